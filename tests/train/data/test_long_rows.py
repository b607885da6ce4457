"""Splitting long rows: nothing is lost, and no fragment teaches to go on from the middle of an answer."""

import numpy as np
import pytest

from fastjax.train.data import load_dataset
from fastjax.train.data.chunk import split_row
from fastjax.train.data.tokenise import TokenRow


def row(mask):
    return TokenRow(np.arange(len(mask), dtype=np.int32), np.array([c == "1" for c in mask]))


@pytest.mark.parametrize(
    ("mask", "pieces"),
    [
        ("01111111", ["0111", "0111"]),  # text: learned on, but for the first token of a piece
        ("00011100", ["0001", "0000"]),  # the answer goes over the cut: its rest is context
        ("00001110", ["0000", "0000"]),  # the answer starts at the cut, its prompt is in the piece before
        ("00000111", ["0000", "0111"]),
        ("0001110011", ["0001", "0000", "00"]),
        ("000111001011", ["0001", "0000", "0011"]),
        ("011", ["011"]),
    ],
)
def test_targets_of_the_pieces(mask, pieces):
    found = split_row(row(mask), 4)
    assert ["".join("01"[int(t)] for t in piece.loss_mask) for piece in found] == pieces
    assert np.concatenate([piece.input_ids for piece in found]).tolist() == list(range(len(mask)))


def test_a_long_text_becomes_documents_that_keep_every_token(chatml):
    text = "The answer is four, and the question was what two and two make. " * 3
    whole = load_dataset([{"text": text}], chatml, max_seq_length=1000)[0]
    dataset = load_dataset([{"text": text}, {"text": "two"}], chatml, max_seq_length=20, long_rows="split")
    joined = np.concatenate([dataset[i].input_ids for i in range(len(dataset) - 1)])
    assert np.array_equal(joined, whole.input_ids)
    assert max(dataset.lengths) <= 20 and len(dataset) > 3
    report = dataset.report
    assert (report.rows_read, report.rows_used, report.rows_split, report.rows_truncated) == (2, 2, 1, 0)
    assert report.num_documents == len(dataset) == sum(report.length_histogram.values())
    assert (
        report.num_targets + report.num_targets_cut
        == whole.loss_mask.sum() + dataset[-1 % len(dataset)].loss_mask.sum()
    )
    assert f"{len(dataset)} documents (1 rows split, 0 documents repeated)" in str(report)


def test_a_split_chat_never_starts_a_piece_inside_an_answer(chatml):
    chat = [
        {"role": role, "content": " ".join(["four and two"] * n)}
        for role, n in (("user", 3), ("assistant", 8), ("user", 1), ("assistant", 2))
    ]
    whole = load_dataset([{"messages": chat}], chatml, max_seq_length=1000)[0]
    dataset = load_dataset([{"messages": chat}], chatml, max_seq_length=24, long_rows="split")
    report = dataset.report
    assert report.rows_read == report.rows_used == 1
    assert report.num_tokens + report.num_tokens_cut == len(whole.input_ids)
    assert report.num_targets + report.num_targets_cut == whole.loss_mask.sum()
    assert report.num_targets_cut > 0
    for document in dataset:
        first = int(np.flatnonzero(document.loss_mask)[0])
        prompt = chatml.decode(document.input_ids[:first])
        assert prompt.endswith("<|im_start|>assistant\n")

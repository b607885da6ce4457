"""What --data names: sources, splits, slices and weights, and what becomes of their rows."""

import json

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.data import hold_out, load_dataset
from fastjax.train.data.readers import read_rows
from fastjax.train.data.sources import Slice, Source, parse_sources


def parts(text):
    return [(s.name, s.config, s.split, s.weight) for s in parse_sources(text)]


def test_names_splits_configurations_slices_and_weights():
    assert parts("a.jsonl") == [("a.jsonl", None, None, 1)]
    assert parts("owner/name:test") == [("owner/name", None, "test", 1)]
    assert parts("owner/name:main:train[:1000]*2") == [("owner/name", "main", "train", 2)]
    assert parts("a.jsonl, b.csv*0.5") == [("a.jsonl", None, None, 1), ("b.csv", None, None, 0.5)]
    (source,) = parse_sources("a.jsonl[10%:-5]")
    assert source == Source("a.jsonl", rows=Slice((10, True), (-5, False)), text="a.jsonl[10%:-5]")


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("[:3]", [0, 1, 2]), ("[7:]", [7, 8, 9]), ("[2:4]", [2, 3]), ("[-2:]", [8, 9]), ("[:-7]", [0, 1, 2]),
        ("[80%:]", [8, 9]), ("[:25%]", [0, 1]), ("[:]", list(range(10))), ("[5:99]", [5, 6, 7, 8, 9]),
    ],
)  # fmt: skip
def test_slices_count_as_in_python_and_in_percent(text, rows, write):
    path = write("a.jsonl", "".join(f'{{"text": "{n}"}}\n' for n in range(10)))
    assert [int(row["text"]) for row, _ in read_rows(f"{path}{text}")] == rows
    assert [int(row["text"]) for row, _ in read_rows(f"{path}:train{text}")] == rows


def test_a_name_that_exists_is_taken_as_it_stands(tmp_path):
    for name in ("a,b[:1]*2.jsonl", "c:test.jsonl"):
        path = tmp_path / name
        path.write_text('{"text": "a"}\n')
        assert parts(str(path)) == [(str(path), None, None, 1)]
    both = f"{tmp_path}/a,b[:1]*2.jsonl,{tmp_path}/c:test.jsonl[:1]"
    assert [name for name, *_ in parts(both)] == [f"{tmp_path}/a,b[:1]*2.jsonl", f"{tmp_path}/c:test.jsonl"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.jsonl[5]", r"\[5\] is not a slice; write \[START:STOP\]"),
        ("a.jsonl[a:b]", r"\[a:b\] is not a slice"),
        ("a.jsonl*x", r"\*x is not a weight"),
        ("a.jsonl*0", r"\*0 is not a weight; it is a number above 0"),
        ("a.jsonl*nan", "is not a weight"),
        ("a.jsonl,,b.jsonl", "has an empty name between its commas"),
    ],
)
def test_what_is_no_source_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        parse_sources(text)


def test_splits_of_files_and_of_folders_on_disk(write, tmp_path):
    path = write("a.jsonl", '{"text": "a"}\n')
    with pytest.raises(UserError, match="a file has no split 'test'"):
        list(read_rows(f"{path}:test"))
    with pytest.raises(UserError, match="is on this disk and has splits, but no configurations"):
        parse_sources(f"{path}:main:test")
    with pytest.raises(UserError, match="a weight belongs to data that is trained on"):
        list(read_rows(f"{path}*2"))
    with pytest.raises(UserError, match=r"a\.jsonl\[5:\]: no rows"):
        list(read_rows(f"{path}[5:]"))


def rows_of(dataset):
    """The text of every document, which is one digit."""
    return [int(chr(row.input_ids[0])) for row in dataset]


@pytest.fixture
def bytes_tokenizer():
    """Ids are character codes."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({chr(n): n for n in range(128)}, []))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="~")


def test_weights_repeat_rows_and_take_parts_of_them_and_all_are_accounted_for(write, bytes_tokenizer):
    low = write("low.jsonl", "".join(f'{{"text": "{n}"}}\n' for n in range(4)))
    high = write("high.jsonl", "".join(f'{{"text": "{n}"}}\n' for n in range(4, 10)))
    mixed = load_dataset(f"{low}*2,{high}*0.5", bytes_tokenizer, max_seq_length=8)
    found = rows_of(mixed)
    assert found[:8] == [0, 1, 2, 3] * 2
    assert len(found) == 11 and len(set(found[8:])) == 3 and min(found[8:]) >= 4
    report = mixed.report
    assert (report.rows_read, report.rows_used, report.dropped) == (10, 7, {"left out by their source's weight": 3})
    assert (report.num_documents, report.num_repeats, report.num_tokens) == (11, 4, 22)
    assert sum(report.length_histogram.values()) == 11
    assert "low.jsonl*2: 4 rows read, 4 used" in str(report) and "4 documents repeated" in str(report)
    again = load_dataset(f"{low}*2,{high}*0.5", bytes_tokenizer, max_seq_length=8)
    other = load_dataset(f"{low}*2,{high}*0.5", bytes_tokenizer, max_seq_length=8, seed=1)
    assert again.fingerprint == mixed.fingerprint != other.fingerprint
    assert len(load_dataset(f"{low},{high}", bytes_tokenizer, max_seq_length=8)) == 10


def test_held_out_rows_are_on_one_side_with_their_copies_and_pieces(write, bytes_tokenizer):
    path = write("a.jsonl", "".join(json.dumps({"text": str(n) * 20}) + "\n" for n in range(10)))
    dataset = load_dataset(f"{path}*2", bytes_tokenizer, max_seq_length=8, long_rows="split")
    assert len(dataset) == 60 and dataset.report.rows_split == 10
    train, evaluation = hold_out(dataset, 0.2, seed=5)
    sides = set(rows_of(train)), set(rows_of(evaluation))
    assert not sides[0] & sides[1] and len(sides[1]) == 2
    assert len(train) == 48 and len(evaluation) == 12
    assert train.report.dropped == {"held out for evaluation": 2}
    for report in (train.report, evaluation.report):
        assert report.rows_read == 10 == report.rows_used + sum(report.dropped.values())
    assert set(rows_of(hold_out(dataset, 0.2, seed=5)[1])) == sides[1]
    assert any(set(rows_of(hold_out(dataset, 0.2, seed=s)[1])) != sides[1] for s in range(6, 9))
    with pytest.raises(UserError, match=r"eval_fraction=0\.9 of 1 rows leaves none to train on"):
        hold_out(load_dataset([{"text": "a"}], bytes_tokenizer, max_seq_length=8), 0.9, 0)


def test_columns_can_have_other_names(write, bytes_tokenizer):
    rows = [{"question": "1", "answer": "2", "text": "9"}, {"q": "1"}]
    columns = {"prompt": "question", "completion": "answer"}
    dataset = load_dataset(rows[:1], bytes_tokenizer, max_seq_length=8, columns=columns)
    assert [chr(t) for t in dataset[0].input_ids] == ["1", "2", "~"]
    assert dataset.report.forms == {"prompt": 1}
    with pytest.raises(UserError, match="row 2: none of data_columns' question, answer is there; keys seen: q"):
        load_dataset(rows, bytes_tokenizer, max_seq_length=8, columns=columns)


def test_a_selection_is_a_dataset_like_any_other(write, bytes_tokenizer):
    path = write("a.jsonl", "".join(f'{{"text": "{n}"}}\n' for n in range(5)))
    mixed = load_dataset(f"{path}[:2],{path}[2:]", bytes_tokenizer, max_seq_length=8)
    assert rows_of(mixed) == [0, 1, 2, 3, 4]
    assert mixed.documents["row"].tolist() == [0, 1, 2, 3, 4] == mixed.document_ids.tolist()
    assert np.array_equal(mixed.lengths, [2] * 5)
    for index in (-1, 5):
        with pytest.raises(IndexError):
            mixed[index]

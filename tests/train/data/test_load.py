"""Long rows, dropped rows, bad rows, the vocabulary, and a report whose totals add up."""

import json

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.data import load_dataset


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROW = chat("What is two?", "The answer is four, and the question was what two and two make.")


def test_row_far_below_the_limit_is_the_same_as_without_one(chatml):
    free, limited = (load_dataset([ROW], chatml, max_seq_length=n) for n in (100_000, 200))
    assert np.array_equal(free[0].loss_mask, limited[0].loss_mask)
    assert limited.report.rows_truncated == 0


def test_row_exactly_at_the_limit_is_not_cut(chatml):
    length = len(load_dataset([ROW], chatml, max_seq_length=200)[0].input_ids)
    for long_rows in ("truncate", "drop", "error"):
        dataset = load_dataset([ROW], chatml, max_seq_length=length, long_rows=long_rows)
        assert len(dataset[0].input_ids) == length
        assert dataset.report.rows_truncated == dataset.report.num_tokens_cut == 0


@pytest.mark.parametrize("row", [ROW, {"text": "The answer is four, and the question was what two and two make."}])
def test_cut_row_keeps_its_head_gets_no_eos_and_is_counted(row, chatml):
    whole = load_dataset([row], chatml, max_seq_length=200)[0]
    length = len(whole.input_ids)
    dataset = load_dataset([row], chatml, max_seq_length=length - 5)
    assert dataset[0].input_ids.tolist() == whole.input_ids[:-5].tolist()
    assert dataset[0].loss_mask.tolist() == whole.loss_mask[:-5].tolist()
    assert dataset[0].input_ids[-1] != chatml.eos_token_id
    assert (dataset.report.rows_truncated, dataset.report.num_tokens_cut) == (1, 5)
    assert "1 rows truncated, 5 tokens cut off" in str(dataset.report)


def test_long_rows_can_be_dropped_or_refused(chatml):
    rows = [ROW, chat("a", "b")]
    dataset = load_dataset(rows, chatml, max_seq_length=20, long_rows="drop")
    assert len(dataset) == 1
    assert dataset.report.dropped == {"longer than max_seq_length": 1}
    with pytest.raises(UserError, match=r"row 1: \d+ tokens, but max_seq_length=20"):
        load_dataset(rows, chatml, max_seq_length=20, long_rows="error")


def test_rows_without_targets_are_dropped_and_counted(chatml):
    rows = [chat("a", "b"), {"messages": [{"role": "user", "content": "only a question"}]}, chat("long " * 30, "x")]
    dataset = load_dataset(rows, chatml, max_seq_length=30)
    assert len(dataset) == 1
    assert dataset.report.dropped == {"with no target": 1, "with no target left after truncation": 1}


def test_rows_of_one_token_or_none_are_dropped(plain):
    dataset = load_dataset([{"text": ""}, {"text": "<|endoftext|>"}, {"text": "ab"}], plain, max_seq_length=30)
    assert dataset.report.dropped == {"empty": 1, "with no target": 1}
    assert len(dataset) == 1


def test_data_without_a_usable_row_is_refused(chatml):
    rows = [{"messages": [{"role": "user", "content": "a"}]}] * 2
    with pytest.raises(UserError, match=r"no usable row among 2 \(2 with no target\)"):
        load_dataset(rows, chatml, max_seq_length=30)


def test_totals_of_the_report_add_up(chatml):
    rows = [chat("a " * n, "b " * n) for n in range(40)] + [{"text": "two"}, {"text": ""}]
    dataset = load_dataset(rows, chatml, max_seq_length=64)
    report = dataset.report
    assert report.rows_read == 42 == sum(report.forms.values())
    assert report.rows_read == report.rows_used + sum(report.dropped.values())
    assert report.rows_used == len(dataset) == sum(report.length_histogram.values())
    assert report.num_tokens == len(dataset.input_ids) == dataset.lengths.sum()
    assert report.num_targets == dataset.loss_mask.sum()
    assert report.longest == dataset.lengths.max() == 64
    assert 0 < report.rows_truncated < 40
    json.dumps(report.to_dict())
    text = str(report)
    assert "read 42 (40 messages, 2 text)" in text
    assert f"targets {report.num_targets:,}" in text


def test_bad_rows_stop_the_load_naming_the_first_three_and_their_number(write, chatml):
    lines = [{"text": "a b"}, {"x": 1}, {"text": 3}, {"messages": []}, {"y": 1}]
    path = write("a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError) as caught:
        load_dataset(path, chatml, max_seq_length=30)
    message = str(caught.value).splitlines()
    assert message[0] == f"{path}: 4 of 5 rows cannot be used; the first:"
    assert [line.strip().split(" ")[0] for line in message[1:]] == [f"{path}:{n}:" for n in (2, 3, 4)]
    single = write("b.jsonl", '{"text": "a b"}\n{"x": 1}\n')
    with pytest.raises(UserError, match=r"b\.jsonl:2: no known row form; keys seen: x; forms known"):
        load_dataset(single, chatml, max_seq_length=30)


def test_ids_beyond_the_vocabulary_name_token_id_and_row(chatml):
    size = len(chatml)
    assert len(load_dataset([chat("a", "b")], chatml, max_seq_length=30, vocab_size=size)) == 1
    with pytest.raises(UserError, match=r"row 2: token id 1 \('<\|im_end\|>'\) is beyond the model's vocabulary of 1"):
        load_dataset([{"text": ""}, {"text": "<|im_start|>" * 3}], chatml, max_seq_length=30, vocab_size=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_seq_length": 1}, "max_seq_length=1"),
        ({"train_on": "answers"}, "train_on='answers' is not one of responses, all"),
        ({"long_rows": "split"}, "long_rows='split' is not one of truncate, drop, error"),
        ({"data_format": "csv"}, "data_format='csv' is not one of messages, conversations"),
    ],
)
def test_options_are_checked(options, words, chatml):
    with pytest.raises(UserError, match=words):
        load_dataset([ROW], chatml, **{"max_seq_length": 30, **options})


def test_data_format_applies_to_every_row(chatml, targets):
    rows = [{"messages": ROW["messages"], "text": "two"}]
    dataset = load_dataset(rows, chatml, max_seq_length=30, data_format="text")
    assert dataset.report.forms == {"text": 1}
    assert chatml.decode(dataset[0].input_ids) == "two<|im_end|>"

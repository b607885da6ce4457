"""Long rows, dropped rows, bad rows, the vocabulary, and a report whose totals add up."""

import json

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.data import DataReport, load_dataset


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
    dataset = load_dataset([chat("a", "b"), chat("long " * 30, "x")], chatml, max_seq_length=30)
    assert len(dataset) == 1
    assert dataset.report.dropped == {"with no target left after truncation": 1}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "content": "only a question"}]}, "there is no assistant message to learn"),
        ({"messages": [{"role": "assistant", "content": "a", "train": False}]}, "marked as context"),
        ({"text": ""}, "it is empty"),
        ({"text": "<|im_end|>"}, "it is a single token"),
        ({"input_ids": [3, 4], "labels": [3, -100]}, "no label after the first token is a target"),
        ({"input_ids": []}, "it is empty"),
    ],
)
def test_rows_without_a_target_are_bad_rows(row, words, chatml):
    rows = [chat("a", "b"), row, chat("c", "d")]
    with pytest.raises(UserError, match=f"row 2: no token of this row is a target: .*{words}"):
        load_dataset(rows, chatml, max_seq_length=30)
    dataset = load_dataset(rows, chatml, max_seq_length=30, skip_bad_rows=True)
    assert len(dataset) == 2
    assert dataset.report.dropped == {"that cannot be used": 1}
    assert words in str(dataset.report)


def test_data_without_a_usable_row_is_refused(chatml):
    rows = [{"messages": [{"role": "user", "content": "a"}]}] * 2
    with pytest.raises(UserError, match=r"no usable row among 2 \(2 that cannot be used\)"):
        load_dataset(rows, chatml, max_seq_length=30, skip_bad_rows=True)


def test_totals_of_the_report_add_up(chatml):
    rows = [chat("a " * n, "b " * n) for n in range(40)] + [{"text": "two"}, {"text": ""}, chat("a " * 99, "b")]
    dataset = load_dataset(rows, chatml, max_seq_length=64, skip_bad_rows=True)
    report = dataset.report
    assert report.rows_read == 43 == sum(report.forms.values())
    assert report.rows_read == report.rows_used + sum(report.dropped.values())
    assert report.rows_used == report.num_documents == len(dataset) == sum(report.length_histogram.values())
    assert report.num_tokens == len(dataset.input_ids) == dataset.lengths.sum()
    assert report.num_targets == dataset.loss_mask.sum()
    assert report.longest == dataset.lengths.max() == 64
    assert 0 < report.rows_truncated < 40
    whole = load_dataset(rows, chatml, max_seq_length=4096, skip_bad_rows=True)
    assert report.dropped == {"that cannot be used": 1, "with no target left after truncation": 1}
    kept = list(whole)[:-1]
    assert report.num_tokens + report.num_tokens_cut == sum(len(row.input_ids) for row in kept)
    assert report.num_targets + report.num_targets_cut == sum(row.loss_mask.sum() for row in kept)
    assert json.loads(json.dumps(report.to_dict()))["rows_read"] == 43
    assert DataReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    text = str(report)
    assert "read 43 (41 messages, 2 text)" in text
    assert f"targets {report.num_targets:,}" in text


def test_bad_rows_stop_the_load_naming_the_first_three_and_their_number(write, chatml):
    lines = [{"text": "a b"}, {"x": 1}, {"text": 3}, {"messages": []}, {"y": 1}]
    path = write("a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError) as caught:
        load_dataset(path, chatml, max_seq_length=30)
    message = str(caught.value).splitlines()
    assert message[0] == f"{path}: 4 of 5 rows cannot be used; the first:"
    assert [line.strip().split(" ")[0] for line in message[1:-1]] == [f"{path}:{n}:" for n in (2, 3, 4)]
    assert message[-1] == "mend them, or leave them out with --skip_bad_rows"
    report = load_dataset(path, chatml, max_seq_length=30, skip_bad_rows=True).report
    assert (report.rows_read, report.rows_used, report.dropped) == (5, 1, {"that cannot be used": 4})
    assert [message.split(" ")[0] for message in report.bad_rows] == [f"{path}:{n}:" for n in (2, 3, 4)]
    single = write("b.jsonl", '{"text": "a b"}\n{"x": 1}\n')
    with pytest.raises(UserError, match=r"b\.jsonl:2: no known row form; keys seen: x; forms known") as caught:
        load_dataset(single, chatml, max_seq_length=30)
    assert "1 of 2 rows cannot be used" in str(caught.value)


def test_broken_lines_are_bad_rows_like_any_other(write, chatml):
    content = b'{"text": "a b"}\n{"text": \n{"text": "c"}\n{"text": "\xff"}\n'
    path = write("a.jsonl", content)
    with pytest.raises(UserError) as caught:
        load_dataset(path, chatml, max_seq_length=30)
    assert "2 of 4 rows" in str(caught.value)
    assert f"{path}:2: broken JSON" in str(caught.value) and f"{path}:4: not UTF-8" in str(caught.value)
    report = load_dataset(path, chatml, max_seq_length=30, skip_bad_rows=True).report
    assert (report.rows_read, report.rows_used, report.forms) == (4, 2, {"text": 2})
    table = write("a.csv", "text,id\na,1\nb\nc,3\n")
    with pytest.raises(UserError, match=r"a\.csv:3: 1 fields under a header of 2; .*\n1 of 3 rows"):
        load_dataset(table, chatml, max_seq_length=30)
    assert load_dataset(table, chatml, max_seq_length=30, skip_bad_rows=True).report.rows_used == 2


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
        ({"long_rows": "cut"}, "long_rows='cut' is not one of truncate, drop, split, error"),
        ({"data_format": "csv"}, "data_format='csv' is not one of input_ids, messages"),
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

"""Batches: every row once an epoch, padding that weighs nothing, and a position that can be taken up again."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.data import TokenisedDataset, eval_batches, steps_per_epoch, train_batches
from fastjax.train.data.report import DataReport
from fastjax.train.data.tokenise import TokenRow


def make_dataset(lengths, first=100):
    """Row i holds the id first + i and is all targets but its first token."""
    rows = [TokenRow(np.full(n, first + i, np.int32), np.arange(n) > 0) for i, n in enumerate(lengths)]
    return TokenisedDataset(rows, DataReport("made"))


TEN = make_dataset([3, 5, 7, 9, 20, 33, 40, 2, 11, 17])


def rows_of(batch):
    """The ids of a batch's real rows, in order."""
    return [int(row[0]) for row in batch["input_ids"].reshape(-1, batch["input_ids"].shape[-1]) if row[0]]


def test_ten_rows_by_four_over_two_epochs_are_six_steps_with_every_row_once_an_epoch():
    assert steps_per_epoch(10, 1, 4) == 3
    with train_batches(TEN, batch_size=1, accumulation=4, seed=7, num_epochs=2) as batches:
        seen = [rows_of(batch) for batch in batches]
    assert [len(rows) for rows in seen] == [4, 4, 2, 4, 4, 2]
    first, second = sum(seen[:3], []), sum(seen[3:], [])
    assert sorted(first) == sorted(second) == list(range(100, 110))
    assert first != second
    assert first != sorted(first)


def test_batch_arrays_are_as_promised_and_padding_has_no_target_and_no_segment():
    with train_batches(TEN, batch_size=2, accumulation=2, seed=1, num_epochs=1) as batches:
        for batch in batches:
            assert {name: array.dtype.name for name, array in batch.items()} == {
                "input_ids": "int32",
                "loss_mask": "bool",
                "segment_ids": "int32",
            }
            assert {array.shape for array in batch.values()} == {(2, 2, batch["input_ids"].shape[-1])}
            assert batch["input_ids"].shape[-1] in batches.widths
            real = batch["segment_ids"] == 1
            assert set(np.unique(batch["segment_ids"])) <= {0, 1}
            assert np.array_equal(real, batch["input_ids"] >= 100)
            assert not batch["loss_mask"][~real].any()
            assert not batch["loss_mask"][..., 0].any()
            for row, length in zip(real.reshape(4, -1), real.sum(-1).reshape(-1), strict=True):
                assert row[:length].all()
    assert len(batches.widths) <= 4


def test_targets_of_an_epoch_are_those_of_the_report():
    with train_batches(TEN, batch_size=3, accumulation=2, seed=1, num_epochs=1) as batches:
        assert sum(int(batch["loss_mask"][..., 1:].sum()) for batch in batches) == TEN.loss_mask.sum()


def test_order_is_a_function_of_seed_and_epoch_and_not_of_micro_batches():
    def order(**options):
        with train_batches(TEN, num_epochs=2, **options) as batches:
            return [row for batch in batches for row in rows_of(batch)]

    assert order(batch_size=1, accumulation=4, seed=3) == order(batch_size=4, accumulation=1, seed=3)
    assert order(batch_size=2, accumulation=2, seed=3) == order(batch_size=1, accumulation=1, seed=3)
    assert order(batch_size=2, seed=3) != order(batch_size=2, seed=4)
    assert order(batch_size=2, shuffle=False) == list(range(100, 110)) * 2


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4, 7])
def test_resuming_anywhere_gives_the_batches_of_an_uninterrupted_run(stop):
    options = {"batch_size": 2, "accumulation": 2, "seed": 11, "num_epochs": 3}
    with train_batches(TEN, **options) as batches:
        uninterrupted = list(batches)
    with train_batches(TEN, **options) as batches:
        for _ in range(stop):
            next(batches)
        state = json.loads(json.dumps(batches.get_state()))
    with train_batches(TEN, **options) as batches:
        batches.set_state(state)
        assert batches.get_state() == state
        resumed = list(batches)
    assert len(resumed) == 9 - stop
    for batch, expected in zip(resumed, uninterrupted[stop:], strict=True):
        assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def test_reading_the_state_does_not_move_it_and_going_back_works():
    with train_batches(TEN, batch_size=2, seed=1) as batches:
        state = batches.get_state()
        first = next(batches)
        batches.set_state(state)
        assert np.array_equal(next(batches)["input_ids"], first["input_ids"])


def test_position_of_other_data_seed_or_batch_is_refused():
    with train_batches(TEN, batch_size=2, accumulation=2, seed=1) as batches:
        state = batches.get_state()
    others = [
        (make_dataset([3, 5, 7, 9, 20, 33, 40, 2, 11, 18]), {}, "dataset="),
        (TEN, {"seed": 2}, "seed=1, this run has seed=2"),
        (TEN, {"batch_size": 1}, "rows_per_step=4, this run has rows_per_step=2"),
    ]
    for dataset, changes, words in others:
        options = {"batch_size": 2, "accumulation": 2, "seed": 1, **changes}
        with train_batches(dataset, **options) as batches, pytest.raises(UserError, match=words):
            batches.set_state(state)
    with train_batches(TEN, batch_size=4, accumulation=1, seed=1) as batches:
        batches.set_state(state)  # the same rows a step, spread over more devices


def test_without_epochs_it_goes_on_for_ever():
    with train_batches(TEN, batch_size=10, seed=1) as batches:
        orders = [tuple(rows_of(next(batches))) for _ in range(20)]
    assert all(sorted(order) == list(range(100, 110)) for order in orders)
    assert len(set(orders)) == 20


@pytest.mark.parametrize(("num_rows", "batch_size", "expected"), [(5, 2, 3), (1, 2, 1), (4, 4, 1), (5, 16, 1)])
def test_evaluation_sees_every_row_once_in_order_with_a_filled_up_last_batch(num_rows, batch_size, expected):
    dataset = make_dataset([4 + i for i in range(num_rows)])
    with eval_batches(dataset, batch_size) as batches:
        seen = list(batches)
    assert len(seen) == expected
    assert all(batch["input_ids"].shape[:2] == (1, batch_size) for batch in seen)
    assert [row for batch in seen for row in rows_of(batch)] == list(range(100, 100 + num_rows))
    assert sum(int(batch["loss_mask"].sum()) for batch in seen) == dataset.loss_mask.sum()


def test_one_row_can_be_trained_on():
    with train_batches(make_dataset([3]), batch_size=2, accumulation=2, seed=0, num_epochs=3) as batches:
        assert [rows_of(batch) for batch in batches] == [[100]] * 3


def test_given_widths_are_used():
    with eval_batches(TEN, 1, widths=[8, 64]) as batches:
        assert [batch["input_ids"].shape[-1] for batch in batches] == [8, 8, 8, 64, 64, 64, 64, 8, 64, 64]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1, "accumulation": 0}, "accumulation=0"),
        ({"batch_size": 1, "num_epochs": 0}, "num_epochs=0"),
        ({"batch_size": 1, "seed": -1}, "seed=-1"),
        ({"batch_size": 1, "seed": 2**32}, "seed=4294967296"),
        ({"batch_size": 1, "widths": [16]}, r"widths=\[16\]; they must ascend to the length of the longest row, 40"),
        ({"batch_size": 1, "widths": [64, 16, 48]}, "widths="),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(UserError, match=words):
        train_batches(TEN, **options)


def test_dataset_is_a_grain_source():
    import grain

    assert isinstance(TEN, grain.sources.RandomAccessDataSource)
    assert len(TEN) == 10
    assert [len(row.input_ids) for row in TEN] == TEN.lengths.tolist()
    for index in (-1, 10):
        with pytest.raises(IndexError):
            TEN[index]


SCRIPT = """
import json, sys
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from fastjax.train.data import eval_batches, load_dataset, prompt_ids, train_batches
backend, template, path, folder = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), eos_token="<|im_end|>", chat_template=template)
for source in (path, folder):
    dataset = load_dataset(source, tokenizer, max_seq_length=64, vocab_size=len(tokenizer))
    train = train_batches(dataset, batch_size=1, accumulation=2, seed=0)
    next(train), next(train)
    list(eval_batches(dataset, 2))
prompt_ids(tokenizer, "a", chat=True)
print(json.dumps([name for name in ("torch", "tensorflow", "flax", "optax") if name in sys.modules]))
"""  # noqa: E501


def test_pipeline_imports_no_torch_and_ends_quietly(tmp_path, chatml):
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "train.jsonl"
    answers = ("b", "c", "The answer is four.")
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]} for answer in answers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend = chatml.backend_tokenizer.to_str()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, backend, chatml.chat_template, str(path), str(path.parent)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert "Traceback" not in done.stderr

"""First-fit packing: every document once, apart from each other, planned ahead, and the same after a resume."""

import json

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.data import DataReport, PackedRows, TokenisedDataset, load_dataset, train_batches
from fastjax.train.data.packing import first_fit
from fastjax.train.data.tokenise import TokenRow


def make_dataset(lengths, first=100):
    """Document i holds the id first + i and is all targets but its first token."""
    rows = [TokenRow(np.full(n, first + i, np.int32), np.arange(n) > 0) for i, n in enumerate(lengths)]
    return TokenisedDataset(rows, DataReport("made"))


def first_fit_by_definition(lengths, row_length):
    room, rows = [], []
    for length in lengths:
        row = next((k for k, left in enumerate(room) if left >= length), len(room))
        if row == len(room):
            room.append(row_length)
        room[row] -= length
        rows.append(row)
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_each_document_goes_into_the_first_row_with_room(seed):
    lengths = np.random.default_rng(seed).integers(1, 40, 150)
    assert first_fit(lengths, 64).tolist() == first_fit_by_definition(lengths.tolist(), 64)


def test_with_too_many_open_rows_the_oldest_is_closed_and_none_overflows():
    lengths = np.array([6, 6, 6, 4, 4, 4])
    assert first_fit(lengths, 10).tolist() == [0, 1, 2, 0, 1, 2]
    assert first_fit(lengths, 10, max_open=2).tolist() == [0, 1, 2, 1, 2, 3]
    many = np.random.default_rng(0).integers(1, 100, 3000)
    rows = first_fit(many, 128, max_open=4)
    assert np.bincount(rows, weights=many).max() <= 128


def test_the_tail_of_a_line_is_where_it_belongs():
    """Rows 1234, 56, 789, 10 in lines of three: one token of the long row may be missing, and nothing else."""
    rows = [{"input_ids": ids} for ids in ([1, 2, 3, 4], [5, 6], [7, 8, 9], [10, 11])]

    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), eos_token="<e>")
    seen = {}
    for policy in ("truncate", "split", "drop"):
        dataset = load_dataset(rows, tokenizer, max_seq_length=3, long_rows=policy)
        packed = PackedRows(dataset, 3, seed=None)
        seen[policy] = sorted(int(t) for row in packed for document in row for t in document.input_ids)
        assert all(sum(len(document.input_ids) for document in row) <= 3 for row in packed)
    assert seen["truncate"] == seen["split"] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert seen["drop"] == [5, 6, 7, 8, 9, 10, 11]


LENGTHS = np.random.default_rng(5).integers(2, 30, 41).tolist()
DATA = make_dataset(LENGTHS)


def test_batches_hold_every_document_whole_with_its_own_segment_and_positions():
    packed = PackedRows(DATA, 64, seed=3)
    with train_batches(packed, batch_size=2, accumulation=2, seed=3, num_epochs=1) as batches:
        seen = []
        for batch in batches:
            assert {name: array.dtype.name for name, array in batch.items()} == {
                "input_ids": "int32", "loss_mask": "bool", "segment_ids": "int32", "positions": "int32",
            }  # fmt: skip
            assert batch["input_ids"].shape == (2, 2, 64)
            flat = {name: array.reshape(4, 64) for name, array in batch.items()}
            for ids, mask, segments, positions in zip(
                flat["input_ids"], flat["loss_mask"], flat["segment_ids"], flat["positions"], strict=True
            ):
                assert not mask[segments == 0].any() and not positions[segments == 0].any()
                assert sorted(set(segments[segments > 0])) == list(range(1, segments.max() + 1))
                for segment in range(1, segments.max() + 1):
                    here = np.flatnonzero(segments == segment)
                    assert np.array_equal(here, np.arange(here[0], here[-1] + 1))
                    assert np.array_equal(positions[here], np.arange(len(here)))
                    assert not mask[here[0]] and mask[here[1:]].all()
                    (token,) = set(ids[here].tolist())
                    assert len(here) == LENGTHS[token - 100]
                    seen.append(token)
    assert sorted(seen) == list(range(100, 141))


def test_the_report_has_the_fill_and_the_number_of_steps_is_known_ahead():
    packed = PackedRows(DATA, 64, seed=3)
    report = packed.report
    assert report.num_packed_rows == len(packed)
    assert packed.lengths.sum() == sum(LENGTHS)
    DATA.report.describe(DATA.documents)
    report = PackedRows(DATA, 64, seed=3).report
    assert report.packing_fill == pytest.approx(sum(LENGTHS) / (64 * len(packed)))
    assert f"{len(packed)} rows of 64 tokens" in str(report)
    assert report.to_dict()["packing_fill"] == report.packing_fill


def test_packing_follows_from_data_and_seed_and_the_order_from_the_epoch():
    def order(seed, **options):
        packed = PackedRows(DATA, 64, seed=seed)
        with train_batches(packed, batch_size=1, seed=seed, num_epochs=2, **options) as batches:
            return [tuple(batch["input_ids"].ravel().tolist()) for batch in batches]

    first, again, other = order(1), order(1), order(2)
    assert first == again != other
    half = len(first) // 2
    assert first[:half] != first[half:] and sorted(first[:half]) == sorted(first[half:])


@pytest.mark.parametrize("stop", [1, 3, 5, 8])
def test_resuming_anywhere_gives_the_batches_of_an_uninterrupted_run(stop):
    options = {"batch_size": 2, "accumulation": 2, "seed": 11, "num_epochs": 3}
    with train_batches(PackedRows(DATA, 64, 11), **options) as batches:
        whole = list(batches)
    with train_batches(PackedRows(DATA, 64, 11), **options) as batches:
        for _ in range(stop):
            next(batches)
        state = json.loads(json.dumps(batches.get_state()))
    with train_batches(PackedRows(DATA, 64, 11), **options) as batches:
        batches.set_state(state)
        resumed = list(batches)
    assert len(whole) > 8 and len(resumed) == len(whole) - stop
    for batch, expected in zip(resumed, whole[stop:], strict=True):
        assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def test_a_position_of_other_packing_is_refused():
    with train_batches(PackedRows(DATA, 64, 1), batch_size=2, seed=1) as batches:
        state = batches.get_state()
    for other in (PackedRows(DATA, 80, 1), PackedRows(DATA, 64, 2), DATA):
        with train_batches(other, batch_size=2, seed=1) as batches, pytest.raises(UserError, match="dataset="):
            batches.set_state(state)


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(UserError, match="29 tokens does not fit into a packed row of max_seq_length=16"):
        PackedRows(make_dataset([3, 29]), 16, 0)


def test_ranks_have_slices_of_the_same_global_batches():
    """Two ranks of one row each and one rank of two see the same rows, in the same steps."""
    packed = PackedRows(DATA, 64, 1)
    with train_batches(packed, batch_size=4, accumulation=1, seed=1, num_epochs=1) as batches:
        one_device = [batch["input_ids"].reshape(-1, 64) for batch in batches]
    with train_batches(packed, batch_size=2, accumulation=2, seed=1, num_epochs=1) as batches:
        accumulated = [batch["input_ids"].reshape(-1, 64) for batch in batches]
    assert all(np.array_equal(a, b) for a, b in zip(one_device, accumulated, strict=True))

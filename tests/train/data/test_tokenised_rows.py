"""Rows that are tokenised already: ids as they are, labels by position, padding taken off."""

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.data import load_dataset
from fastjax.train.data.rows import normalise, recognise


@pytest.mark.parametrize(
    ("row", "ids", "mask"),
    [
        ({"input_ids": [5, 6, 7]}, [5, 6, 7], [1, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, [5, 6, 7], [0, 1, 0]),
        ({"input_ids": [5, 6, 7], "labels": None}, [5, 6, 7], [1, 1, 1]),
        ({"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "labels": [-100, -100, 6, -100]}, [5, 6], [0, 1]),
        ({"input_ids": [5, 6], "completion_mask": [0, 1]}, [5, 6], [0, 1]),
        ({"input_ids": [5, 6], "assistant_masks": [True, False]}, [5, 6], [1, 0]),
        ({"input_ids": "[5, 6]", "labels": "[-100, 6]"}, [5, 6], [0, 1]),
        ({"input_ids": np.array([5, 6]), "text": "x", "messages": []}, [5, 6], [1, 1]),
    ],
)
def test_ids_and_targets(row, ids, mask):
    assert recognise(row, "f:1") == "input_ids"
    normal = normalise(row, "f:1", "input_ids")
    assert normal.input_ids.tolist() == ids and normal.input_ids.dtype == np.int32
    assert normal.loss_mask.tolist() == [bool(m) for m in mask]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": ["a"]}, "f:1: input_ids is a list; it must be a list of whole numbers"),
        ({"input_ids": [[1], [2, 3]]}, "whole numbers"),
        ({"input_ids": [1.5]}, "whole numbers"),
        ({"input_ids": [-1, 2]}, "input_ids has -1 to 2; token ids are from 0"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries and input_ids 2"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\] is 2 and input_ids\[0\] is 1; a label is its own"),
        ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [0, 1]}, "labels and loss_mask both say"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "attention_mask must have one entry a token"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1]}, "attention_mask must have one entry a token"),
    ],
)
def test_bad_ids_are_refused_by_place_and_reason(row, words):
    with pytest.raises(UserError, match=words):
        normalise(row, "f:1", "input_ids")


def test_ids_stand_in_their_place_among_rows_of_text_with_nothing_added(plain):
    rows = [{"text": "two"}, {"input_ids": [3, 4, 5], "labels": [3, -100, 5]}, {"text": "two"}]
    dataset = load_dataset(rows, plain, max_seq_length=30, vocab_size=len(plain))
    assert np.array_equal(dataset[0].input_ids, dataset[2].input_ids)
    assert dataset[1].input_ids.tolist() == [3, 4, 5]
    # The first token of a row has nothing before it to be predicted from.
    assert dataset[1].loss_mask.tolist() == [False, False, True]
    assert dataset.report.forms == {"text": 2, "input_ids": 1}
    with pytest.raises(UserError, match="row 1: token id 5 .* is beyond the model's vocabulary of 5"):
        load_dataset(rows[1:2] * 2, plain, max_seq_length=30, vocab_size=5)


def test_marks_on_other_roles():
    chat = [{"role": "user", "content": "u", "train": False}, {"role": "assistant", "content": "a", "weight": 1}]
    row = normalise({"messages": chat}, "f:1", "messages")
    assert row.trained == [False, True] and row.messages[0] == {"role": "user", "content": "u"}
    with pytest.raises(UserError, match=r"f:1: messages\[0\]: the user message is marked to be learned \(train\)"):
        normalise({"messages": [{"role": "user", "content": "u", "train": True}]}, "f:1", "messages")

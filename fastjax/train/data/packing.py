"""Several documents in one row: first-fit, planned ahead from lengths alone.

The plan is a function of (lengths, row length, seed): documents are taken in an order drawn by the seed, each goes into
the first open row that has room for it, and a new row is opened where none has. So the number of rows, and of steps, is
known before training, and a position in the data is a number of rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import SupportsIndex

import numpy as np

from fastjax.errors import UserError
from fastjax.train.data.buckets import choose_widths
from fastjax.train.data.dataset import Dataset
from fastjax.train.data.tokenise import TokenRow

# Rows that are open at once; with one more, the oldest is closed. This bounds the time a document takes.
MAX_OPEN = 256


def first_fit(lengths: np.ndarray, row_length: int, max_open: int = MAX_OPEN) -> np.ndarray:
    """[D] int64: the row that each document goes into, by first-fit over at most `max_open` open rows.

    Args:
      lengths: [D] int, tokens of the documents in their order; each from 1 to `row_length`.
    """
    rows = np.empty(len(lengths), np.int64)
    room = np.zeros(max_open, np.int64)  # of the open rows, oldest first
    number = np.zeros(max_open, np.int64)  # and which they are
    num_open = num_rows = 0
    shortest = int(lengths.min(initial=row_length))
    for document, length in enumerate(lengths.tolist()):
        slot = int((room[:num_open] >= length).argmax()) if num_open else 0
        if not num_open or room[slot] < length:
            if num_open == max_open:
                room[:-1], number[:-1] = room[1:].copy(), number[1:].copy()
                num_open -= 1
            slot = num_open
            room[slot], number[slot] = row_length, num_rows
            num_open += 1
            num_rows += 1
        rows[document] = number[slot]
        room[slot] -= length
        if room[slot] < shortest:  # nothing fits any more
            room[slot : num_open - 1] = room[slot + 1 : num_open].copy()
            number[slot : num_open - 1] = number[slot + 1 : num_open].copy()
            num_open -= 1
    return rows


class PackedRows:
    """Rows of several documents each; row i holds documents [offsets[i], offsets[i + 1]) of the packing order."""

    def __init__(self, dataset: Dataset, max_seq_length: int, seed: int | None) -> None:
        """Args: seed: of the order in which documents are packed; None keeps the data's.

        Raises: UserError for a document longer than a row.
        """
        lengths = np.asarray(dataset.lengths)
        if lengths.max(initial=0) > max_seq_length:
            raise UserError(
                f"a document of {lengths.max()} tokens does not fit into a packed row of "
                f"max_seq_length={max_seq_length}; load the data with that max_seq_length"
            )
        self._dataset, self.max_seq_length, self._seed = dataset, max_seq_length, seed
        order = np.arange(len(lengths))
        if seed is not None:
            order = np.random.Generator(np.random.PCG64([seed, len(lengths)])).permutation(len(lengths))
        rows = first_fit(lengths[order], max_seq_length)
        by_row = np.argsort(rows, kind="stable")
        self._documents = order[by_row]
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=int(rows.max(initial=-1)) + 1))])
        self.report = replace(dataset.report, num_packed_rows=len(self), packed_length=0)
        self.lengths = np.add.reduceat(lengths[self._documents], self._offsets[:-1])
        self.report.packed_length = choose_widths(self.lengths, 1, 1)[-1]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: SupportsIndex) -> list[TokenRow]:
        number = int(index)
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return [self._dataset[document] for document in self.document_numbers(number)]

    def __iter__(self) -> Iterator[list[TokenRow]]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"PackedRows({len(self)} rows of {len(self._documents)} documents)"

    def document_numbers(self, row: int) -> list[int]:
        """The documents of a packed row, in the order in which they stand in it."""
        return self._documents[self._offsets[row] : self._offsets[row + 1]].tolist()

    @property
    def fingerprint(self) -> str:
        """Of the documents and of how they are packed."""
        return f"{self._dataset.fingerprint}-packed-{self.max_seq_length}-{self._seed}"

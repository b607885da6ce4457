"""Tokenised rows in three flat arrays, read one row at a time."""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import SupportsIndex

import numpy as np

from fastjax.train.data.report import DataReport
from fastjax.train.data.tokenise import TokenRow


class TokenisedDataset:
    """Rows of tokens by index; has the two methods of Grain's RandomAccessDataSource.

    input_ids: [N] int32 and loss_mask: [N] bool, all rows end to end; row i is [offsets[i], offsets[i + 1]).
    offsets: [rows + 1] int64, ascending from 0. report: what became of the rows that were read.
    """

    def __init__(self, rows: Iterable[TokenRow], report: DataReport) -> None:
        kept = list(rows)
        self.offsets = np.concatenate([[0], np.cumsum([len(row.input_ids) for row in kept], dtype=np.int64)])
        self.input_ids = np.concatenate([row.input_ids for row in kept] or [np.zeros(0, np.int32)])
        self.loss_mask = np.concatenate([row.loss_mask for row in kept] or [np.zeros(0, bool)])
        self.report = report

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: SupportsIndex) -> TokenRow:
        number = int(index)
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        start, stop = self.offsets[number], self.offsets[number + 1]
        return TokenRow(self.input_ids[start:stop], self.loss_mask[start:stop])

    def __iter__(self) -> Iterator[TokenRow]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        # Grain writes the source's name into its messages.
        return f"TokenisedDataset({len(self)} rows, {len(self.input_ids)} tokens)"

    @property
    def lengths(self) -> np.ndarray:
        """[rows] int64, the tokens of each row."""
        return np.diff(self.offsets)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of every id, target and row boundary: equal data, equal text."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.offsets, self.input_ids, self.loss_mask):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

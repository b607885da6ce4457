"""Tokenised documents in flat arrays, in memory or mapped from disk, and selections of them."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, SupportsIndex

import numpy as np

from fastjax.train.data.report import DataReport
from fastjax.train.data.tokenise import TokenRow

# One entry a document, that is a row or a piece of a split one: its row's number, its tokens, its targets, and what of
# the row is not trained on: tokens cut off, and targets cut off or masked.
DOCUMENT = np.dtype(
    [("row", "i8"), ("length", "i4"), ("num_targets", "i4"), ("num_tokens_cut", "i4"), ("num_targets_cut", "i4")]
)


class Dataset(Protocol):
    """Documents by index.

    Attributes:
      documents: [D] of dtype DOCUMENT.
      document_ids: [D] int64, equal for repeats of one document and for nothing else.
      lengths: [D] int64, the tokens of each document.
      fingerprint: equal data, equal text.
      report: what became of the rows that were read.
    """

    report: DataReport

    @property
    def documents(self) -> np.ndarray: ...

    @property
    def document_ids(self) -> np.ndarray: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: SupportsIndex) -> TokenRow: ...


class TokenisedDataset:
    """The documents of one source; has the two methods of Grain's RandomAccessDataSource.

    input_ids: [N] int32 and loss_mask: [N] bool, all documents end to end; document i is [offsets[i], offsets[i + 1]).
    offsets: [D + 1] int64, ascending from 0. documents: [D] of dtype DOCUMENT.
    report: what became of the rows that were read.
    """

    def __init__(self, rows: Iterable[TokenRow], report: DataReport) -> None:
        """A data set of rows in memory, each a document."""
        kept = list(rows)
        documents = np.zeros(len(kept), DOCUMENT)
        documents["row"] = np.arange(len(kept))
        documents["length"] = [len(row.input_ids) for row in kept]
        documents["num_targets"] = [int(row.loss_mask.sum()) for row in kept]
        ids = np.concatenate([row.input_ids for row in kept] or [np.zeros(0, np.int32)])
        mask = np.concatenate([row.loss_mask for row in kept] or [np.zeros(0, bool)])
        self._fill(ids, mask, documents, report, None)

    @classmethod
    def from_arrays(
        cls,
        input_ids: np.ndarray,
        loss_mask: np.ndarray,
        documents: np.ndarray,
        report: DataReport,
        fingerprint: str | None = None,
    ) -> "TokenisedDataset":
        """A data set over arrays, which may be mapped from disk; `fingerprint` spares reading them."""
        made = cls.__new__(cls)
        made._fill(input_ids, loss_mask, documents, report, fingerprint)
        return made

    def _fill(
        self,
        input_ids: np.ndarray,
        loss_mask: np.ndarray,
        documents: np.ndarray,
        report: DataReport,
        fingerprint: str | None,
    ) -> None:
        self.input_ids, self.loss_mask, self.documents, self.report = input_ids, loss_mask, documents, report
        self.offsets = np.concatenate([[0], np.cumsum(documents["length"], dtype=np.int64)])
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.documents)

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
    def document_ids(self) -> np.ndarray:
        """[D] int64: every document is there once."""
        return np.arange(len(self))

    @property
    def lengths(self) -> np.ndarray:
        """[D] int64, the tokens of each document."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """A digest of every id, target and document boundary: equal data, equal text."""
        if self._fingerprint is None:
            digests = Digests()
            digests.update(self.input_ids, self.loss_mask, self.documents)
            self._fingerprint = digests.result()
        return self._fingerprint


class Selection:
    """Documents of one or several data sets, in an order of its own; a document may come several times.

    Indices count through the data sets one after the other.
    """

    def __init__(self, datasets: Sequence[Dataset], index: np.ndarray, report: DataReport) -> None:
        """Args: index: [D] int64."""
        self._datasets, self._index, self.report = list(datasets), index, report
        self._starts = np.concatenate([[0], np.cumsum([len(dataset) for dataset in datasets])])

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: SupportsIndex) -> TokenRow:
        number = int(index)
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        document = int(self._index[number])
        part = int(np.searchsorted(self._starts, document, side="right")) - 1
        return self._datasets[part][document - int(self._starts[part])]

    def __iter__(self) -> Iterator[TokenRow]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Selection({len(self)} documents of {int(self._starts[-1])})"

    @functools.cached_property
    def documents(self) -> np.ndarray:
        """[D] of dtype DOCUMENT; rows are numbered through the data sets."""
        found: list[np.ndarray] = []
        for dataset in self._datasets:
            documents = np.array(dataset.documents)
            documents["row"] += found[-1]["row"].max(initial=-1) + 1 if found else 0
            found.append(documents)
        return np.concatenate(found)[self._index]

    @functools.cached_property
    def document_ids(self) -> np.ndarray:
        """[D] int64, equal for repeats of one document and for nothing else."""
        found: list[np.ndarray] = []
        for dataset in self._datasets:
            found.append(dataset.document_ids + (found[-1].max(initial=-1) + 1 if found else 0))
        return np.concatenate(found)[self._index]

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """[D] int64, the tokens of each document."""
        return self.documents["length"].astype(np.int64)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the data sets and of the choice."""
        digest = hashlib.blake2b(digest_size=8)
        for dataset in self._datasets:
            digest.update(dataset.fingerprint.encode())
        digest.update(np.ascontiguousarray(self._index).data)
        return digest.hexdigest()


class Digests:
    """The fingerprint of arrays that come in pieces, wherever the pieces are cut."""

    def __init__(self) -> None:
        self._parts = [hashlib.blake2b(digest_size=8) for _ in range(3)]

    def update(self, input_ids: np.ndarray, loss_mask: np.ndarray, documents: np.ndarray) -> None:
        lengths = documents["length"].astype(np.int64)
        for digest, array in zip(self._parts, (input_ids, loss_mask, lengths), strict=True):
            digest.update(np.ascontiguousarray(array).data)

    def result(self) -> str:
        return hashlib.blake2b(b"".join(part.digest() for part in self._parts), digest_size=8).hexdigest()

"""Host batches from tokenised rows: Grain shuffles, batches, repeats and keeps the position.

A batch is one optimiser step: {"input_ids": int32, "loss_mask": bool, "segment_ids": int32}, each [A, B, T] for A
micro-batches of B rows. B counts the rows of all data-parallel ranks; each rank has an equal run of them. loss_mask is
True where the token is a target (to be predicted from the one before), never on the first of a document: nothing is
predicted across a border. segment_ids counts the documents of a row from 1, and is 0 on padding. Packed batches also
have "positions" int32, each token's place in its document. T is one of few widths. The last window of an epoch is
filled up with rows that are all padding, so that every row is seen once an epoch.

The order is a function of (data, seed, epoch) alone: how a window divides into micro-batches, or over ranks, does not
change it. Threads that read ahead do not change the position that is saved: it is that of the batch handed out next.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from fastjax.errors import UserError
from fastjax.train.data.buckets import MAX_BUCKETS, choose_widths, width_for
from fastjax.train.data.dataset import Dataset
from fastjax.train.data.packing import PackedRows
from fastjax.train.data.tokenise import TokenRow

Batch = dict[str, np.ndarray]
# Batches that a thread makes ahead: pages of mapped files come from the disk while the step before runs.
_AHEAD = 4
PAD_TOKEN_ID = 0  # any id of the vocabulary would do: padding is known by its segment id, never by its token


def steps_per_epoch(num_rows: int, batch_size: int, accumulation: int = 1) -> int:
    """Optimiser steps of one epoch, the short last window included."""
    return math.ceil(num_rows / (batch_size * accumulation))


def train_batches(
    dataset: Dataset | PackedRows,
    *,
    batch_size: int,
    accumulation: int = 1,
    seed: int = 0,
    num_epochs: int | None = None,
    shuffle: bool = True,
    widths: Sequence[int] | None = None,
    local_rows: Sequence[range] | None = None,
) -> "Batches":
    """Batches for training, reshuffled every epoch.

    Args:
      dataset: a document a row, or packed rows.
      batch_size: B, rows per micro-batch over all data-parallel ranks.
      accumulation: A, micro-batches per optimiser step.
      seed: of the order, 0 to 2**32 - 1.
      num_epochs: after which the iterator ends; None goes on for ever.
      shuffle: False keeps the data's order.
      widths: ascending row widths; None chooses them from the data.
      local_rows: those of a micro-batch's B rows that this process reads; the others stay padding. None means all.
    Raises: UserError for sizes below 1, a seed out of range, or widths too small for the longest row.
    """
    return Batches(dataset, batch_size, accumulation, seed if shuffle else None, num_epochs, widths, local_rows)


def eval_batches(
    dataset: Dataset | PackedRows,
    batch_size: int,
    *,
    widths: Sequence[int] | None = None,
    local_rows: Sequence[range] | None = None,
) -> "Batches":
    """Batches [1, B, T] over every row once, in order. Raises: as `train_batches`."""
    return Batches(dataset, batch_size, 1, None, 1, widths, local_rows)


class Batches:
    """An iterator over batches whose position can be saved; `widths` are the T that occur, `packed` whether rows hold
    several documents."""

    def __init__(
        self,
        dataset: Dataset | PackedRows,
        batch_size: int,
        accumulation: int,
        seed: int | None,
        num_epochs: int | None,
        widths: Sequence[int] | None,
        local_rows: Sequence[range] | None = None,
    ) -> None:
        import grain

        for name, value in (("batch_size", batch_size), ("accumulation", accumulation), ("num_epochs", num_epochs)):
            if value is not None and value < 1:
                raise UserError(f"{name}={value}; it must be at least 1")
        if seed is not None and not 0 <= seed < 2**32:
            raise UserError(f"seed={seed}; it must be from 0 to {2**32 - 1}")
        rows = batch_size * accumulation
        longest = int(dataset.lengths.max())
        if widths is None:
            # Packed rows are all nearly full.
            widths = choose_widths(dataset.lengths, rows, 1 if isinstance(dataset, PackedRows) else MAX_BUCKETS)
        self.widths = list(widths)
        if self.widths != sorted(self.widths) or not self.widths or self.widths[-1] < longest:
            raise UserError(f"widths={self.widths}; they must ascend to the length of the longest row, {longest}")
        self._shape, self.packed = (accumulation, batch_size), isinstance(dataset, PackedRows)
        self._local_rows = local_rows
        self._identity = {"dataset": dataset.fingerprint, "seed": seed, "rows_per_step": rows}
        pipeline = grain.MapDataset.source(dataset)
        if seed is not None:
            pipeline = pipeline.seed(seed).shuffle()
        # Batched before it is repeated: no window reaches over the end of an epoch.
        pipeline = pipeline.batch(rows, drop_remainder=False, batch_fn=self._collate).repeat(num_epochs)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)
        self._iterator = pipeline.to_iter_dataset(read_options=options).__iter__()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The position, in a form that JSON takes: the batch that comes next, and whose position it is."""
        return {"next_step": int(self._iterator.get_state()["next_index"]), **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises: UserError if it was saved with other data, seed or rows per step."""
        for key, ours in self._identity.items():
            if state.get(key) != ours:
                raise UserError(
                    f"the saved data position has {key}={state.get(key)}, this run has {key}={ours}; "
                    "resume with the same data, seed and batch, or start a new run"
                )
        self._iterator.set_state({"next_index": state["next_step"]})

    def close(self) -> None:
        """End the iterator; further batches are refused."""
        self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collate(self, rows: Sequence[TokenRow | list[TokenRow]]) -> Batch:
        packed = [[row] if isinstance(row, TokenRow) else row for row in rows]
        width = width_for(max(sum(len(document.input_ids) for document in row) for row in packed), self.widths)
        shape = (self._shape[0] * self._shape[1], width)
        batch = {
            "input_ids": np.full(shape, PAD_TOKEN_ID, np.int32),
            "loss_mask": np.zeros(shape, bool),
            "segment_ids": np.zeros(shape, np.int32),
        }
        if self.packed:
            batch["positions"] = np.zeros(shape, np.int32)
        for index, row in enumerate(packed):
            # A row that is not ours is a view of mapped memory, of which only the length has been looked at.
            if not self._is_local(index):
                continue
            start = 0
            for segment, document in enumerate(row, start=1):
                length = len(document.input_ids)
                here = index, slice(start, start + length)
                batch["input_ids"][here] = document.input_ids
                batch["loss_mask"][here] = document.loss_mask
                batch["loss_mask"][index, start] = False  # nothing is predicted from the document before
                batch["segment_ids"][here] = segment
                if self.packed:
                    batch["positions"][here] = np.arange(length)
                start += length
        return {name: array.reshape(*self._shape, width) for name, array in batch.items()}

    def _is_local(self, index: int) -> bool:
        """Whether this process reads a row, counted through all micro-batches."""
        return self._local_rows is None or any(index % self._shape[1] in rows for rows in self._local_rows)

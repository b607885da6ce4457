"""Batches on the devices, the next one on its way while a step runs."""

from collections.abc import Callable
from typing import Any

import jax

from fastjax.train.data import Batches

DeviceBatch = dict[str, jax.Array]


class Feed:
    """Hands batches out; its position is that of the batch handed out next, wherever the ones read ahead are."""

    def __init__(self, batches: Batches, put: Callable[[dict[str, Any]], DeviceBatch]) -> None:
        """Args: put: from a host batch to one on the devices, without waiting for the copy."""
        self._batches, self._put = batches, put
        self._ready: tuple[dict[str, Any], DeviceBatch] | None = None

    def take(self) -> DeviceBatch:
        """The next batch."""
        (_, batch), self._ready = self._ready or self._load(), None
        return batch

    def prepare(self) -> None:
        """Starts the copy of the next batch, if it is not there yet."""
        self._ready = self._ready or self._load()

    def get_state(self) -> dict[str, Any]:
        """The position of the next batch, in a form that JSON takes."""
        return self._batches.get_state() if self._ready is None else self._ready[0]

    def close(self) -> None:
        """No batch can be taken after this."""
        self._ready = None
        self._batches.close()

    def _load(self) -> tuple[dict[str, Any], DeviceBatch]:
        return self._batches.get_state(), self._put(next(self._batches))

"""Tile sizes of the cross-entropy kernel."""

from dataclasses import dataclass

from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Tiles:
    """A program owns one row of logits, `columns` at a time; num_warps warps of 32 threads, num_stages loads ahead."""

    columns: int
    num_warps: int
    num_stages: int


def softmax_tiles(vocab: int) -> Tiles:
    columns = min(4096, pl.next_power_of_2(vocab))
    return Tiles(columns, num_warps=min(4, max(1, columns // 512)), num_stages=1)

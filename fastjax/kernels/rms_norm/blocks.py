"""Tile sizes of the RMSNorm kernels."""

from dataclasses import dataclass

from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Tiles:
    """A program owns `rows` whole rows, in `columns` >= D columns; num_warps warps of 32 threads."""

    rows: int
    columns: int
    num_warps: int


def rms_norm_tiles(width: int) -> Tiles:
    """About 4096 numbers a program and 16 a thread, so that loads are long and reductions cross few warps."""
    columns = pl.next_power_of_2(width)
    rows = max(1, 4096 // columns)
    return Tiles(rows, columns, num_warps=min(16, rows * columns // 512))

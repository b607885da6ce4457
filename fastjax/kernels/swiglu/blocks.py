"""Tile sizes of the SwiGLU kernels."""

from dataclasses import dataclass

from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Tiles:
    """A program owns `columns` columns of one row; num_warps warps of 32 threads."""

    columns: int
    num_warps: int


def swiglu_tiles(width: int) -> Tiles:
    """8 numbers a thread: one load of 16 bytes an operand in bfloat16."""
    return Tiles(columns=min(1024, pl.next_power_of_2(width)), num_warps=4)

"""Tile sizes of the kernels on blocks of integers."""

from dataclasses import dataclass

from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Tiles:
    """A program owns `blocks` blocks of 256 numbers; num_warps warps of 32 threads."""

    blocks: int
    num_warps: int


def int_blocks_tiles(num_blocks: int) -> Tiles:
    """16 numbers a thread, four loads of 16 bytes in float32. Not measured."""
    return Tiles(blocks=min(8, pl.next_power_of_2(num_blocks)), num_warps=4)

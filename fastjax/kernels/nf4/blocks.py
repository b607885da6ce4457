"""Tile sizes of the 4-bit kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """num_blocks quantisation blocks of 64 a step, num_steps steps a program, num_warps warps of 32 threads."""

    num_blocks: int
    num_steps: int
    num_warps: int


def dequantize_tiles() -> Tiles:
    return Tiles(num_blocks=64, num_steps=1, num_warps=4)


def quantize_tiles() -> Tiles:
    return Tiles(num_blocks=64, num_steps=1, num_warps=4)

"""Tile sizes of the adapter kernels, and which way of adding the adapter's product is cheaper."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SumTiles:
    """rows of W and blocks of 64 columns that a program owns."""

    rows: int
    blocks: int
    num_warps: int


def sum_tiles() -> SumTiles:
    return SumTiles(rows=64, blocks=1, num_warps=4)


def columns_are_cheaper(num_in: int, num_out: int) -> bool:
    """Whether [x | x . A] . [W | B]^T beats x . W^T + (x . A) . B^T.

    The first copies x, 4 bytes a value and row of x, and multiplies 64 columns more; the second writes and reads the
    adapter's product and reads and writes y, 8 bytes a value. On an H200 (4.3 TB/s, 687 TFLOP/s) they meet at
    in = 1.8 out; see benchmarks/results/lora.md.
    """
    return num_in < 1.8 * num_out

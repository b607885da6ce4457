"""Tile sizes of the 4-bit products."""

from dataclasses import dataclass

from fastjax.kernels.nf4.tables import BLOCK_SIZE


@dataclass(frozen=True)
class Tiles:
    """Of one program of the forward kernels.

    Attributes:
      rows: rows of x; 1 means the vector kernel, which takes all rows of x at once.
      out: rows of W.
      blocks: quantisation blocks of 64 along `in`, a step.
      unroll: steps whose loads are issued together (vector kernel).
      splits: programs that share one tile of y, each with its part of `in`.
    """

    rows: int
    out: int
    blocks: int
    unroll: int
    splits: int
    num_warps: int


@dataclass(frozen=True)
class GradientTiles:
    """rows of dout, blocks of 64 columns of dx, and `out` rows of W a step."""

    rows: int
    blocks: int
    out: int
    num_warps: int


def _largest_divisor(number: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if number % d == 0)


def _power_of_two_divisor(number: int, limit: int) -> int:
    divisor = 1
    while divisor * 2 <= limit and number % (divisor * 2) == 0:
        divisor *= 2
    return divisor


def vector_tiles(num_rows: int, shape: tuple[int, int], dtype) -> Tiles:
    num_blocks = shape[1] // BLOCK_SIZE
    blocks = _power_of_two_divisor(num_blocks, 8)
    unroll = _largest_divisor(num_blocks // blocks, 4 if num_rows == 1 else 2)
    steps = num_blocks // (blocks * unroll)
    # Enough programs to fill the multiprocessors several times over; fewer parts mean less to add afterwards.
    splits = next((d for d in range(1, steps + 1) if steps % d == 0 and d * shape[0] >= 16 * 1024), steps)
    return Tiles(rows=1, out=16, blocks=blocks, unroll=unroll, splits=splits, num_warps=4)


def matrix_tiles(num_rows: int, shape: tuple[int, int], dtype) -> Tiles:
    num_blocks = shape[1] // BLOCK_SIZE
    blocks = _power_of_two_divisor(num_blocks, 8)
    # The tensor cores take 16 values along `in` at a time.
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    steps = num_blocks // blocks
    splits = next((d for d in range(1, steps + 1) if steps % d == 0 and d * shape[0] >= 64 * 512), steps)
    return Tiles(rows=rows, out=64, blocks=blocks, unroll=1, splits=splits, num_warps=4)


def gradient_tiles(num_rows: int) -> GradientTiles:
    return GradientTiles(rows=16 if num_rows <= 16 else 64, blocks=1, out=64, num_warps=4)


# Rows of x up to which decoding inside the product beats dequantising first; see benchmarks/results/quant_matmul.md.
_FUSED_ROWS = 64


def fused_is_faster(num_rows: int) -> bool:
    return num_rows <= _FUSED_ROWS

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
      lookups: half of the weights are decoded through a table in memory, which leaves the integer units less to do.
    """

    rows: int
    out: int
    blocks: int
    unroll: int
    splits: int
    num_warps: int
    lookups: bool = False


@dataclass(frozen=True)
class GradientTiles:
    """rows of dout, blocks of 64 columns of dx, and `out` rows of W a step."""

    rows: int
    blocks: int
    out: int
    num_warps: int


# Rows of x up to which the vector kernel is the faster one, and up to which decoding inside the product beats
# dequantising first: benchmarks/results/quant_matmul.md, on an H200. Not measured on other GPUs, where they hold too.
_VECTOR_ROWS = 2
_FUSED_ROWS = 64


def fused_is_faster(num_rows: int) -> bool:
    return num_rows <= _FUSED_ROWS


def forward_tiles(num_rows: int, shape: tuple[int, int], is_float32: bool) -> Tiles:
    """Tiles for x [num_rows, in] and W of this shape (out, in).

    `in` is split until there are enough programs to fill the multiprocessors several times over, and no further, since
    the parts must be added afterwards.
    """
    num_out, num_in = shape
    is_vector = num_rows <= _VECTOR_ROWS
    # Without tensor cores every product of a tile is an instruction of its own, which takes long to compile.
    blocks = 2 if is_float32 and not is_vector else 8
    unroll = 4 if is_vector and num_in >= 4 * blocks * BLOCK_SIZE else 1
    steps = -(-num_in // (BLOCK_SIZE * blocks * unroll))
    wanted = 14336 if is_vector else 32768
    splits = next((d for d in range(1, steps + 1) if steps % d == 0 and d * num_out >= wanted), steps)
    if is_vector:
        return Tiles(rows=1, out=16, blocks=blocks, unroll=unroll, splits=splits, num_warps=4, lookups=True)
    # The tensor cores take at least 16 rows.
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return Tiles(rows=rows, out=64, blocks=blocks, unroll=1, splits=splits, num_warps=4)


def gradient_tiles(num_rows: int) -> GradientTiles:
    return GradientTiles(rows=16 if num_rows <= 16 else 64, blocks=1, out=64, num_warps=4)

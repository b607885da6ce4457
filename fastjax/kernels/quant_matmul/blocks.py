"""Tile sizes of the 4-bit products."""

from dataclasses import dataclass

import jax.numpy as jnp

from fastjax.kernels.nf4.tables import BLOCK_SIZE


@dataclass(frozen=True)
class Tiles:
    """Of one program of the kernel for more rows.

    Attributes:
      rows: rows of x.
      out: rows of W.
      blocks: quantisation blocks of 64 along `in`, a step.
      splits: programs that share one tile of y, each with its part of `in`.
    """

    rows: int
    out: int
    blocks: int
    splits: int
    num_warps: int


@dataclass(frozen=True)
class FewRowsTiles:
    """Of one program of the few-rows kernel.

    Attributes:
      in_warps: warps that share `in`.
      row_warps: warps side by side along W's rows, reading the same x; 2 <= in_warps * row_warps <= 16.
      row_tiles: of 16 rows of W, a warp: 1 or an even number.
      columns: rows of x: 4, 8 or 16.
    """

    in_warps: int
    row_warps: int
    row_tiles: int
    columns: int

    @property
    def num_warps(self) -> int:
        return self.in_warps * self.row_warps


@dataclass(frozen=True)
class GradientTiles:
    """rows of dout, blocks of 64 columns of dx, and `out` rows of W a step."""

    rows: int
    blocks: int
    out: int
    num_warps: int


# Rows of x up to which the kernel for few rows is the faster one, and up to which decoding inside the product beats
# dequantising first: benchmarks/results/quant_matmul.md, on an H200. Not measured on other GPUs, where they hold too.
_FEW_ROWS = 16
_FUSED_ROWS = 64


def fused_is_faster(num_rows: int) -> bool:
    return num_rows <= _FUSED_ROWS


def forward_tiles(num_rows: int, shape: tuple[int, int], dtype: jnp.dtype) -> Tiles | FewRowsTiles:
    """Tiles for x [num_rows, in] and W of this shape (out, in)."""
    num_out, num_in = shape
    if dtype == jnp.bfloat16 and num_rows <= _FEW_ROWS:
        return _few_rows_tiles(num_rows, num_out, num_in)
    # Without tensor cores every product of a tile is an instruction of its own, which takes long to compile.
    blocks = 2 if dtype == jnp.float32 else 8
    steps = -(-num_in // (BLOCK_SIZE * blocks))
    # `in` is split until there are enough programs to fill the multiprocessors several times over, and no further,
    # since the parts must be added afterwards.
    splits = next((d for d in range(1, steps + 1) if steps % d == 0 and d * num_out >= 32768), steps)
    # The tensor cores take at least 16 rows.
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return Tiles(rows=rows, out=64, blocks=blocks, splits=splits, num_warps=4)


def _few_rows_tiles(num_rows: int, num_out: int, num_in: int) -> FewRowsTiles:
    """Eight warps a program, and as many rows of W as let all programs of an H200, 132 multiprocessors, run at once.

    A multiprocessor's registers hold two programs with one tile a warp, and one with two tiles, which read x half as
    often.
    """
    columns, row_tiles, programs = (4, 1, 264) if num_rows <= 2 else (8, 1, 264) if num_rows <= 8 else (16, 2, 132)
    row_warps = 1
    while row_warps < 8 and num_out > 16 * row_tiles * row_warps * programs:
        row_warps *= 2
    num_steps = -(-num_in // (4 * BLOCK_SIZE))
    in_warps = 8 // row_warps
    while in_warps > max(num_steps, 3 - row_warps):
        in_warps //= 2
    return FewRowsTiles(in_warps=in_warps, row_warps=row_warps, row_tiles=row_tiles, columns=columns)


def gradient_tiles(num_rows: int) -> GradientTiles:
    return GradientTiles(rows=16 if num_rows <= 16 else 64, blocks=1, out=64, num_warps=4)

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
      num_warps: of 32 threads, which share `in`; num_warps * groups <= 16.
      groups: of 8 rows of x: 1 or 2.
      row_tiles: of 16 rows of W; a multiple of `groups`.
      blocks: quantisation blocks of 64 that a warp reads a step ahead: 4 or 8.
    """

    num_warps: int
    groups: int
    row_tiles: int
    blocks: int


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
    """As many warps a program as keep all programs on the multiprocessors at once, about 14 warps each."""
    groups = 1 if num_rows <= 8 else 2
    num_blocks = -(-num_in // BLOCK_SIZE)
    programs = -(-num_out // (16 * groups))
    num_warps = 2
    while num_warps < 8 and num_warps * programs < 2000 // groups and num_warps * 4 < num_blocks:
        num_warps *= 2
    return FewRowsTiles(num_warps=num_warps, groups=groups, row_tiles=groups, blocks=4)


def gradient_tiles(num_rows: int) -> GradientTiles:
    return GradientTiles(rows=16 if num_rows <= 16 else 64, blocks=1, out=64, num_warps=4)

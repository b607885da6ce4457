"""Tile sizes of the adapter kernels, and which way of adding the adapter's product is cheaper."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class SumTiles:
    """rows of W and blocks of 64 columns that a program owns."""

    rows: int
    blocks: int
    num_warps: int


def sum_tiles() -> SumTiles:
    return SumTiles(rows=64, blocks=1, num_warps=4)


@dataclass(frozen=True)
class GradientTiles:
    """Of one program of the kernel that makes both skinny products of dy.

    Attributes:
      columns: of dy.
      rows: of dy, a step.
      steps: steps a program.
    """

    columns: int
    rows: int
    steps: int
    num_warps: int
    num_stages: int


def one_pass_rank(max_rank: int, dtype: jnp.dtype) -> int | None:
    """The rank to which adapters are padded for the kernel that reads dy once, or None where it does not pay.

    The parts of its sums grow with the square of the rank over the columns that a program can hold. Tensor-core
    products have at least 16 terms, and tiles are powers of two.
    """
    rank = max(16, 1 << (max_rank - 1).bit_length())
    return rank if rank <= 32 and jnp.dtype(dtype).itemsize == 2 else None


def gradient_tiles(rank: int) -> GradientTiles:
    return GradientTiles(columns=512, rows=32, steps=16, num_warps=rank // 4, num_stages=3)


def columns_are_cheaper(num_in: int, num_out: int) -> bool:
    """Whether [x | x . A] . [W | B]^T beats x . W^T + (x . A) . B^T.

    The first copies x, 4 bytes a value and row of x, and multiplies 64 columns more; the second writes and reads the
    adapter's product and reads and writes y, 8 bytes a value. On an H200 (4.3 TB/s, 687 TFLOP/s) they meet at
    in = 1.8 out; see benchmarks/results/lora.md.
    """
    return num_in < 1.8 * num_out

"""Tile sizes of the adapter kernels, and which way of adding the adapter's product is cheaper.

Measured on an H200 (benchmarks/results/lora.md); the tiles fit the shared memory of the other GPUs, where nobody has
measured them.
"""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class SumTiles:
    """rows of W and blocks of 64 columns that a program owns."""

    rows: int
    blocks: int
    num_warps: int


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


@dataclass(frozen=True)
class ColumnTiles:
    """rows of x that a program owns, and columns a step."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AddTiles:
    """rows and columns of y that a program owns."""

    rows: int
    columns: int
    num_warps: int


def sum_tiles() -> SumTiles:
    return SumTiles(rows=32, blocks=4, num_warps=8)


def gradient_tiles(rank: int) -> GradientTiles:
    """More columns mean smaller parts of t and more registers for dB."""
    return GradientTiles(columns=512 if rank <= 16 else 256, rows=32, steps=16, num_warps=4, num_stages=3)


def column_tiles(num_in: int, num_extra: int) -> ColumnTiles:
    columns = 128 if num_in % 128 == 0 else 64
    return ColumnTiles(rows=64, columns=columns, num_warps=4, num_stages=4 if num_extra <= 64 else 3)


def add_tiles() -> AddTiles:
    return AddTiles(rows=64, columns=128, num_warps=4)


def padded_rank(max_rank: int) -> int:
    """Tensor-core products have at least 16 terms, and tiles are powers of two."""
    return max(16, 1 << (max_rank - 1).bit_length())


def one_pass_over_gradient(rank: int, dtype: jnp.dtype) -> bool:
    """Whether `gradient_products` pays: its parts grow with the square of the rank. Its tiles are for 16-bit values."""
    return rank <= 32 and jnp.dtype(dtype).itemsize == 2


def one_pass_over_input(num_extra: int, dtype: jnp.dtype) -> bool:
    """Whether `with_columns` can be used: its sums are in registers. Its tiles are for 16-bit values."""
    return num_extra <= 128 and jnp.dtype(dtype).itemsize == 2


def columns_are_cheaper(num_in: int, num_out: int) -> bool:
    """Whether [x | x . A] . [W | B]^T beats x . W^T + (x . A) . B^T.

    Beside the product x . A that both make, the first writes a copy of x, 2 bytes a value, and multiplies 64 columns
    more; the second reads and writes y, 4 bytes a value. On an H200 (4.3 TB/s, 687 TFLOP/s) they meet at in = 1.6 out;
    see benchmarks/results/lora.md.
    """
    return num_in < 1.6 * num_out

"""Two kernels of the forward over many rows, for the two ways of adding the adapter's product (see `many_rows`).

[x | x . A] is x with further columns: copying x and multiplying it read it once. y + (x . A) . B is done in place.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.lora.blocks import AddTiles, ColumnTiles, add_tiles, column_tiles


def _columns_kernel(x_ref, lora_a_ref, out_ref, xa_ref, *, tiles: ColumnTiles):
    """Owns `rows` of x, copied `columns` at a time, with a float32 sum [rows, further columns].

    Rows of A past its end count as zeros.
    """
    num_rows, num_in = x_ref.shape
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
    inside = None if num_rows % tiles.rows == 0 else row[:, None] < num_rows
    extra = jnp.arange(out_ref.shape[1] - num_in)
    is_product = None if len(extra) == lora_a_ref.shape[0] else extra < lora_a_ref.shape[0]
    in_a = None if is_product is None else is_product[:, None]

    def step(i, total):
        column = i * tiles.columns + jnp.arange(tiles.columns)
        place = (row[:, None], column[None])
        x = plgpu.load(x_ref.at[place], mask=inside, other=None if inside is None else 0.0)
        lora_a = plgpu.load(lora_a_ref.at[extra[:, None], column[None]], mask=in_a, other=None if in_a is None else 0.0)
        plgpu.store(out_ref.at[place], x, mask=inside)
        return total + jnp.dot(x, lora_a.T, preferred_element_type=jnp.float32)

    zeros = jnp.zeros((tiles.rows, len(extra)), jnp.float32)
    xa = jax.lax.fori_loop(0, num_in // tiles.columns, step, zeros).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row[:, None], (num_in + extra)[None]], xa, mask=inside)
    if is_product is not None:
        inside = is_product[None] if inside is None else is_product[None] & inside
    plgpu.store(xa_ref.at[row[:, None], extra[None]], xa, mask=inside)


def with_columns(
    x: jax.Array, lora_a: jax.Array, num_extra: int, *, tiles: ColumnTiles | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """([x | x . A | 0], x . A) of one pass over x.

    Args:
      x: [M, in], bfloat16 or float16; `in` is a multiple of 64.
      lora_a: [C, in] in the same dtype.
      num_extra: the further columns, a power of two, C at least.
    Returns: [M, in + num_extra] and [M, C] in x's dtype.
    """
    num_rows, num_in = x.shape
    tiles = tiles or column_tiles(num_in, num_extra)
    return pl.pallas_call(
        partial(_columns_kernel, tiles=tiles),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, num_in + num_extra), x.dtype),
            jax.ShapeDtypeStruct((num_rows, len(lora_a)), x.dtype),
        ),
        grid=(pl.cdiv(num_rows, tiles.rows),),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="lora_columns",
    )(x, lora_a)


def _add_kernel(y_ref, xa_ref, lora_b_ref, out_ref, *, tiles: AddTiles):
    """Owns y[rows, columns]; programs past the end do nothing."""
    row = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows)
    column = pl.program_id(0) * tiles.columns + jnp.arange(tiles.columns)
    row_inside, column_inside = row[:, None] < y_ref.shape[0], column[:, None] < y_ref.shape[1]
    index = jnp.arange(xa_ref.shape[1])
    place, inside = (row[:, None], column[None]), row_inside & (column < y_ref.shape[1])[None]
    y = plgpu.load(y_ref.at[place], mask=inside, other=0.0)
    xa = plgpu.load(xa_ref.at[row[:, None], index[None]], mask=row_inside, other=0.0)
    lora_b = plgpu.load(lora_b_ref.at[column[:, None], index[None]], mask=column_inside, other=0.0)
    precision = jax.lax.Precision.HIGHEST if xa.dtype == jnp.float32 else None
    update = jnp.dot(xa, lora_b.T, precision=precision, preferred_element_type=jnp.float32)
    plgpu.store(out_ref.at[place], (y.astype(jnp.float32) + update).astype(out_ref.dtype), mask=inside)


def add_product(
    y: jax.Array, xa: jax.Array, lora_b: jax.Array, *, tiles: AddTiles | None = None, interpret: bool = False
) -> jax.Array:
    """y [M, out] + xa [M, C] . lora_b [out, C]^T in y's dtype, in y's memory; C is a power of two, 16 at least."""
    tiles = tiles or add_tiles()
    return pl.pallas_call(
        partial(_add_kernel, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid=(pl.cdiv(y.shape[1], tiles.columns), pl.cdiv(y.shape[0], tiles.rows)),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="lora_add",
    )(y, xa, lora_b)

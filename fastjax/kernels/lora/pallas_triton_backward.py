"""Two kernels of the backward over many rows: the matrix of the input gradient, and both skinny products of dy.

    dx = dy . W + (dy . B) . A = dy . (W + B . A)

so that the adapter costs the backward no pass over dx. The sum is float32, rounded once; in bfloat16 that rounding is
of the size of those that dy and dx have anyway. (The forward keeps the products apart: there an update smaller than
the rounding of W has to count from the first step on.)

    t = dy . B          dB = dy^T . (x . A)

both read dy, which is most of what they cost: `gradient_products` reads it once. A program that owns a tile of dy has
a part of either; the parts are added afterwards, in a fixed order.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.lora.blocks import GradientTiles, SumTiles, gradient_tiles, sum_tiles
from fastjax.kernels.nf4.pallas_triton import (
    absmax_operands,
    block_values,
    codes_operand,
    indexable,
    layer_index,
    load_absmax,
)
from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES
from fastjax.kernels.nf4.weight import QuantizedWeight

_HALF = BLOCK_SIZE // 2


def _sum_kernel(
    codes_ref,
    table_ref,
    lora_a_ref,
    lora_b_ref,
    *refs,
    weight: tuple[tuple[int, int], jnp.dtype],
    first_row: int,
    first_rank: int,
    tiles: SumTiles,
    has_buffer: bool,
):
    """Owns [rows, blocks * 64] of one weight: decodes them, adds B[rows] . A[:, columns] in float32."""
    *absmax_refs, out_ref = refs
    absmax_refs = absmax_refs[: len(absmax_refs) - has_buffer]
    (num_out, num_in), weight_dtype = weight
    num_blocks = num_in // BLOCK_SIZE
    # Tiles past the end are moved back inside: what two programs write there is the same.
    row = jnp.minimum(pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows), num_out - 1)
    block = jnp.minimum(pl.program_id(0) * tiles.blocks + jnp.arange(tiles.blocks), num_blocks - 1)
    place = row[:, None] * num_blocks + block
    column = (block[:, None] * BLOCK_SIZE + jnp.arange(BLOCK_SIZE)).reshape(tiles.blocks * BLOCK_SIZE)
    # The adapter's product is made while the codes are on their way.
    codes = plgpu.load(codes_ref.at[layer_index(absmax_refs), place[:, :, None] * _HALF + jnp.arange(_HALF)])
    index = jnp.arange(lora_b_ref.shape[1])
    lora_a = plgpu.load(lora_a_ref.at[(first_rank + index)[:, None], column[None]])
    lora_b = plgpu.load(lora_b_ref.at[(first_row + row)[:, None], index[None]])
    precision = jax.lax.Precision.HIGHEST if lora_a.dtype == jnp.float32 else None
    update = jnp.dot(lora_b, lora_a, precision=precision, preferred_element_type=jnp.float32)
    values = block_values(codes, table_ref, load_absmax(absmax_refs, place), weight_dtype)
    values = values.reshape(tiles.rows, tiles.blocks * BLOCK_SIZE).astype(jnp.float32) + update
    plgpu.store(out_ref.at[(first_row + row)[:, None], column[None]], values.astype(out_ref.dtype))


def weights_plus_adapters(
    weights: Sequence[QuantizedWeight],
    lora_a: jax.Array,
    lora_b: jax.Array,
    *,
    tiles: SumTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The matrices W_i + B_i . A_i below one another, [sum out, in] in the adapters' dtype.

    Args:
      weights: of the same `in`, a multiple of 64.
      lora_a: [projections * R, in], R a power of two, 16 at least.
      lora_b: [sum out, R] in the same dtype, the scale included.
    """
    tiles = tiles or sum_tiles()
    rank = lora_b.shape[1]
    buffer: tuple[jax.Array, ...] = ()
    first_row = 0
    for i, weight in enumerate(map(indexable, weights)):
        table = jnp.asarray(CODES[weight.quant_type])
        operands = (codes_operand(weight), table, lora_a, lora_b, *absmax_operands(weight), *buffer)
        out = pl.pallas_call(
            partial(
                _sum_kernel,
                weight=(weight.shape, weight.dtype),
                first_row=first_row,
                first_rank=i * rank,
                tiles=tiles,
                has_buffer=bool(buffer),
            ),
            out_shape=jax.ShapeDtypeStruct((len(lora_b), lora_a.shape[1]), lora_a.dtype),
            grid=(pl.cdiv(lora_a.shape[1] // BLOCK_SIZE, tiles.blocks), pl.cdiv(weight.shape[0], tiles.rows)),
            input_output_aliases={len(operands) - 1: 0} if buffer else {},
            compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
            interpret=interpret,
            name="lora_weight_sum",
        )(*operands)
        buffer = (out,)
        first_row += weight.shape[0]
    return buffer[0]


def _gradient_kernel(
    dout_ref, xa_ref, lora_b_ref, t_ref, db_ref, *, shape: tuple[int, int], outs: tuple[int, ...], tiles: GradientTiles
):
    """Owns dy[steps * rows, columns], all columns of one projection: writes their parts of t and of dB, float32."""
    num_rows, rank = shape
    tile, part = pl.program_id(0), pl.program_id(1)
    # The projection, its first tile, and its first column and the end of its columns.
    index, first_tile, start, end = jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.int32(outs[0])
    num_tiles, num_columns = 0, 0
    for i, num_out in enumerate(outs):
        inside = tile >= num_tiles
        index, first_tile = jnp.where(inside, i, index), jnp.where(inside, num_tiles, first_tile)
        start, end = jnp.where(inside, num_columns, start), jnp.where(inside, num_columns + num_out, end)
        num_tiles, num_columns = num_tiles + pl.cdiv(num_out, tiles.columns), num_columns + num_out
    column = start + (tile - first_tile) * tiles.columns + jnp.arange(tiles.columns)
    # Masks are left out where they would be true everywhere.
    column_inside = None if all(num_out % tiles.columns == 0 for num_out in outs) else column < end
    whole_rows = num_rows % (tiles.rows * tiles.steps) == 0
    of_rank = jnp.arange(rank)
    lora_b = _load(lora_b_ref, column, of_rank, column_inside, None)

    def step(i, db):
        row = (part * tiles.steps + i) * tiles.rows + jnp.arange(tiles.rows)
        row_inside = None if whole_rows else row < num_rows
        dout = _load(dout_ref, row, column, row_inside, column_inside)
        xa = _load(xa_ref, row, index * rank + of_rank, row_inside, None)
        t = jnp.dot(dout, lora_b, preferred_element_type=jnp.float32)
        plgpu.store(t_ref.at[tile, row[:, None], of_rank[None]], t, mask=_mask(row_inside, None))
        return db + jnp.dot(dout.T, xa, preferred_element_type=jnp.float32)

    db = jax.lax.fori_loop(0, tiles.steps, step, jnp.zeros((tiles.columns, rank), jnp.float32))
    plgpu.store(db_ref.at[part, column[:, None], of_rank[None]], db, mask=_mask(column_inside, None))


def _mask(row_inside: jax.Array | None, column_inside: jax.Array | None) -> jax.Array | None:
    rows = None if row_inside is None else row_inside[:, None]
    columns = None if column_inside is None else column_inside[None]
    return rows if columns is None else columns if rows is None else rows & columns


def _load(ref, row: jax.Array, column: jax.Array, row_inside: jax.Array | None, column_inside: jax.Array | None):
    """[rows, columns] of ref, zeros where a mask is False."""
    mask = _mask(row_inside, column_inside)
    return plgpu.load(ref.at[row[:, None], column[None]], mask=mask, other=None if mask is None else 0.0)


def gradient_products(
    dout: jax.Array,
    xa: jax.Array,
    lora_b: jax.Array,
    outs: Sequence[int],
    *,
    tiles: GradientTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The products dy_i . B_i and dy_i^T . xa_i of joined projections, of one pass over dy.

    Args:
      dout: [M, sum out], bfloat16 or float16.
      xa: [M, projections * R] in the same dtype.
      lora_b: [sum out, R] in the same dtype; R is a power of two, 16 at least.
      outs: columns of dout that belong to each projection.
    Returns: ([M, projections * R] in dout's dtype, float32 [sum out, R]), summed in float32 in a fixed order.
    """
    num_rows, num_columns = dout.shape
    rank = lora_b.shape[1]
    tiles = tiles or gradient_tiles(rank)
    num_tiles = [pl.cdiv(num_out, tiles.columns) for num_out in outs]
    num_parts = pl.cdiv(num_rows, tiles.rows * tiles.steps)
    t_parts, db_parts = pl.pallas_call(
        partial(_gradient_kernel, shape=(num_rows, rank), outs=tuple(outs), tiles=tiles),
        out_shape=(
            jax.ShapeDtypeStruct((sum(num_tiles), num_rows, rank), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, num_columns, rank), jnp.float32),
        ),
        grid=(sum(num_tiles), num_parts),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="lora_gradient_products",
    )(dout, xa, lora_b)
    ends = np.cumsum(num_tiles)
    t = [jnp.sum(t_parts[end - n : end], axis=0) for n, end in zip(num_tiles, ends, strict=True)]
    return jnp.concatenate(t, axis=1).astype(dout.dtype), jnp.sum(db_parts, axis=0)

"""W + B . A, decoded, summed and rounded in one kernel: the matrix of the input gradient.

    dx = dy . W + (dy . B) . A = dy . (W + B . A)

so that the adapter costs the backward no pass over dx. The sum is float32, rounded once; in bfloat16 that rounding is
of the size of those that dy and dx have anyway. (The forward keeps the products apart: there an update smaller than
the rounding of W has to count from the first step on.)
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.lora.blocks import SumTiles, sum_tiles
from fastjax.kernels.nf4.pallas_triton import absmax_operands, interleave, load_absmax, lookup
from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES
from fastjax.kernels.nf4.weight import QuantizedWeight

_HALF = BLOCK_SIZE // 2


def _sum_kernel(
    codes_ref,
    table_ref,
    lora_a_ref,
    lora_b_ref,
    *refs,
    shape: tuple[int, int],
    first_row: int,
    rank: int,
    tiles: SumTiles,
    has_buffer: bool,
):
    """Owns [rows, blocks * 64] of one weight: decodes them as float32, adds B[rows] . A[:, columns]."""
    *absmax_refs, out_ref = refs
    absmax_refs = absmax_refs[: len(absmax_refs) - has_buffer]
    num_out, num_in = shape
    num_blocks = num_in // BLOCK_SIZE
    # Tiles past the end are moved back inside: what two programs write there is the same.
    row = jnp.minimum(pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows), num_out - 1)
    block = jnp.minimum(pl.program_id(1) * tiles.blocks + jnp.arange(tiles.blocks), num_blocks - 1)
    place = row[:, None] * num_blocks + block
    codes = plgpu.load(codes_ref.at[place[:, :, None] * _HALF + jnp.arange(_HALF)])
    scale = load_absmax(absmax_refs, place)[:, :, None]
    high, low = lookup(table_ref, codes)
    values = interleave(high * scale, low * scale).reshape(tiles.rows, tiles.blocks * BLOCK_SIZE)
    column = (block[:, None] * BLOCK_SIZE + jnp.arange(BLOCK_SIZE)).reshape(tiles.blocks * BLOCK_SIZE)
    index = jnp.arange(rank)
    lora_b = plgpu.load(lora_b_ref.at[row[:, None] * rank + index])
    lora_a = plgpu.load(lora_a_ref.at[index[:, None] * num_in + column])
    precision = jax.lax.Precision.HIGHEST if lora_a.dtype == jnp.float32 else None
    values = values + jnp.dot(lora_b, lora_a, precision=precision, preferred_element_type=jnp.float32)
    plgpu.store(out_ref.at[(first_row + row)[:, None], column[None]], values.astype(out_ref.dtype))


def weights_plus_adapters(
    weights: Sequence[QuantizedWeight],
    lora_a: Sequence[jax.Array],
    lora_b: Sequence[jax.Array],
    dtype: jnp.dtype,
    *,
    tiles: SumTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The matrices W_i + B_i . A_i below one another, [sum out, in].

    Args:
      weights: of the same `in`, a multiple of 64.
      lora_a: [R_i, in] each.
      lora_b: [out_i, R_i] each, the scale included.
    """
    tiles = tiles or sum_tiles()
    num_rows = sum(weight.shape[0] for weight in weights)
    num_in = weights[0].shape[1]
    buffer: tuple[jax.Array, ...] = ()
    first_row = 0
    for weight, a, b in zip(map(QuantizedWeight.one_layer, weights), lora_a, lora_b, strict=True):
        # Tensor-core products have at least 16 terms, and tiles are powers of two.
        rank = max(16, pl.next_power_of_2(a.shape[0]))
        a = jnp.pad(a.astype(dtype), ((0, rank - a.shape[0]), (0, 0))).reshape(-1)
        b = jnp.pad(b.astype(dtype), ((0, 0), (0, rank - b.shape[1]))).reshape(-1)
        table = jnp.asarray(CODES[weight.quant_type])
        operands = (weight.codes.reshape(-1), table, a, b, *absmax_operands(weight), *buffer)
        out = pl.pallas_call(
            partial(
                _sum_kernel,
                shape=weight.shape,
                first_row=first_row,
                rank=rank,
                tiles=tiles,
                has_buffer=bool(buffer),
            ),
            out_shape=jax.ShapeDtypeStruct((num_rows, num_in), dtype),
            grid=(pl.cdiv(weight.shape[0], tiles.rows), pl.cdiv(num_in // BLOCK_SIZE, tiles.blocks)),
            input_output_aliases={len(operands) - 1: 0} if buffer else {},
            compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
            interpret=interpret,
            name="lora_weight_sum",
        )(*operands)
        buffer = (out,)
        first_row += weight.shape[0]
    return buffer[0]

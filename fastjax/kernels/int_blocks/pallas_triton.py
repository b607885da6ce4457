"""Blocks of integers as Pallas-Triton kernels: one pass over memory each.

With m the largest magnitude of a block and q = 127 or 7:  scale = m / q,  code = floor(x / scale + 1/2),
error = x - code scale;  and sum_r code_r scale_r in float32, r in ascending order.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.int_blocks.blocks import Tiles, int_blocks_tiles
from fastjax.kernels.int_blocks.reference import BLOCK_SIZE, LARGEST

_HALF = BLOCK_SIZE // 2


def _rows(num_blocks: int, tiles: Tiles):
    """(indices of this program's blocks, which of them there are)."""
    rows = pl.program_id(0) * tiles.blocks + jnp.arange(tiles.blocks)
    return rows, rows < num_blocks


def _quantize_kernel(x_ref, codes_ref, scale_ref, error_ref, *, bits: int, num_blocks: int, tiles: Tiles):
    """Owns some blocks, as their two halves: of 4-bit codes the first is the low and the second the high nibble."""
    rows, there = _rows(num_blocks, tiles)
    mask = jnp.broadcast_to(there[:, None], (tiles.blocks, _HALF))
    places = [(rows[:, None], (start + jnp.arange(_HALF))[None, :]) for start in (0, _HALF)]
    halves = [plgpu.load(x_ref.at[place], mask=mask, other=0).astype(jnp.float32) for place in places]
    absmax = jnp.maximum(*(jnp.max(jnp.abs(half), axis=1) for half in halves))
    # A maximum on the device may pass over a NaN. Nought times what is not finite is NaN, and so is its sum.
    absmax += jnp.sum(halves[0] * 0.0, axis=1) + jnp.sum(halves[1] * 0.0, axis=1)
    scale = absmax * (1 / LARGEST[bits])
    divisor = jnp.where(scale == 0, 1.0, scale)[:, None]
    whole = [jnp.floor(half / divisor + 0.5) for half in halves]
    for place, half, codes in zip(places, halves, whole, strict=True):
        plgpu.store(error_ref.at[place], half - codes * scale[:, None], mask=mask)
    plgpu.store(scale_ref.at[rows], scale, mask=there)
    low, high = (jnp.where(codes == codes, codes, 0.0).astype(jnp.int32) for codes in whole)
    if bits == 4:
        plgpu.store(codes_ref.at[places[0]], ((low & 15) | (high << 4)).astype(jnp.int8), mask=mask)
    else:
        for place, codes in zip(places, (low, high), strict=True):
            plgpu.store(codes_ref.at[place], codes.astype(jnp.int8), mask=mask)


def _sum_kernel(codes_ref, scale_ref, total_ref, *, bits: int, num_blocks: int, tiles: Tiles):
    """Owns the sum of some blocks over all parts."""
    rows, there = _rows(num_blocks, tiles)
    mask = jnp.broadcast_to(there[:, None], (tiles.blocks, _HALF))
    columns = [(start + jnp.arange(_HALF))[None, :] for start in (0, _HALF)]

    def add(part, totals):
        scale = plgpu.load(scale_ref.at[part, rows], mask=there, other=0)[:, None]
        load = lambda half: plgpu.load(  # noqa: E731
            codes_ref.at[part, rows[:, None], columns[half]], mask=mask, other=0
        ).astype(jnp.int32)
        halves = (load(0), load(1)) if bits == 8 else (load(0) << 28 >> 28, load(0) >> 4)
        return tuple(total + half.astype(jnp.float32) * scale for total, half in zip(totals, halves, strict=True))

    zeros = jnp.zeros((tiles.blocks, _HALF), jnp.float32)
    totals = jax.lax.fori_loop(0, codes_ref.shape[0], add, (zeros, zeros))
    for column, total in zip(columns, totals, strict=True):
        plgpu.store(total_ref.at[rows[:, None], column], total, mask=mask)


def _call(kernel, name: str, outputs, operands, bits: int, num_blocks: int, interpret: bool):
    tiles = int_blocks_tiles(num_blocks)
    return pl.pallas_call(
        partial(kernel, bits=bits, num_blocks=num_blocks, tiles=tiles),
        out_shape=outputs,
        grid=(pl.cdiv(num_blocks, tiles.blocks),),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)


def quantize_pallas(values: jax.Array, bits: int, interpret: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `fastjax.kernels.int_blocks.quantize_int_blocks`."""
    blocks = values.reshape(-1, BLOCK_SIZE)
    num_blocks = blocks.shape[0]
    outputs = (
        jax.ShapeDtypeStruct((num_blocks, BLOCK_SIZE * bits // 8), jnp.int8),
        jax.ShapeDtypeStruct((num_blocks,), jnp.float32),
        jax.ShapeDtypeStruct(blocks.shape, jnp.float32),
    )
    codes, scales, error = _call(_quantize_kernel, "int_quantize", outputs, (blocks,), bits, num_blocks, interpret)
    return codes.reshape(-1), scales, error.reshape(-1)


def sum_pallas(codes: jax.Array, scales: jax.Array, bits: int, interpret: bool) -> jax.Array:
    """See `fastjax.kernels.int_blocks.sum_int_blocks`."""
    num, num_blocks = scales.shape
    operands = codes.reshape(num, num_blocks, -1), scales
    total = jax.ShapeDtypeStruct((num_blocks, BLOCK_SIZE), jnp.float32)
    return _call(_sum_kernel, "int_sum", total, operands, bits, num_blocks, interpret).reshape(-1)

"""8-bit blockwise quantisation in plain jnp: the definition of right, and on a GPU one or two fused loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.kernels.nf4.tables import dynamic_map

BLOCK_SIZE = 256


def absmax_shape(shape: tuple[int, ...], num_stacked: int = 0) -> tuple[int, ...]:
    """The shape of the block scales of values of this shape.

    The trailing dimensions that make up whole blocks become one, [..., blocks], and the others stay: a tensor split
    over devices then keeps its blocks where its values are. Where no dimensions make whole blocks, the last block of
    each stacked tensor is partial: [*stack, blocks].
    """
    start = _first_folded(shape, num_stacked)
    return (*shape[:start], -(-math.prod(shape[start:]) // BLOCK_SIZE))


def quantize_reference(values: jax.Array, signed: bool, num_stacked: int = 0) -> tuple[jax.Array, jax.Array]:
    """See `fastjax.kernels.quantized_state.quantize_state`."""
    blocks = _to_blocks(values.astype(jnp.float32), num_stacked)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    scaled = blocks / jnp.where(absmax == 0.0, 1.0, absmax)[..., None]
    table = dynamic_map(signed)
    bounds = (table[:-1] + table[1:]) / np.float32(2)
    codes = jnp.searchsorted(jnp.asarray(bounds), scaled, side="left", method="scan_unrolled").astype(jnp.uint8)
    return _from_blocks(codes, values.shape, num_stacked), absmax


def dequantize_reference(codes: jax.Array, absmax: jax.Array, signed: bool, num_stacked: int = 0) -> jax.Array:
    """See `fastjax.kernels.quantized_state.dequantize_state`."""
    values = jnp.asarray(dynamic_map(signed))[_to_blocks(codes, num_stacked).astype(jnp.int32)] * absmax[..., None]
    return _from_blocks(values, codes.shape, num_stacked)


def zero_code(signed: bool) -> int:
    """The code of 0.0."""
    return int(np.flatnonzero(dynamic_map(signed) == 0.0)[0])


def _first_folded(shape: tuple[int, ...], num_stacked: int) -> int:
    for start in range(len(shape) - 1, num_stacked - 1, -1):
        if math.prod(shape[start:]) % BLOCK_SIZE == 0:
            return start
    return num_stacked


def _to_blocks(values: jax.Array, num_stacked: int) -> jax.Array:
    """[..., blocks, 256], the last block filled up with zeros."""
    shape = values.shape[: _first_folded(values.shape, num_stacked)]
    rows = values.reshape(*shape, -1)
    rows = jnp.pad(rows, [(0, 0)] * len(shape) + [(0, -rows.shape[-1] % BLOCK_SIZE)])
    return rows.reshape(*shape, -1, BLOCK_SIZE)


def _from_blocks(blocks: jax.Array, shape: tuple[int, ...], num_stacked: int) -> jax.Array:
    start = _first_folded(shape, num_stacked)
    rows = blocks.reshape(*shape[:start], -1)
    return rows[..., : math.prod(shape[start:])].reshape(shape)

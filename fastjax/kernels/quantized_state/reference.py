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
    codes = nearest_codes(blocks / jnp.where(absmax == 0.0, 1.0, absmax)[..., None], signed)
    return _from_blocks(codes, values.shape, num_stacked), absmax


def nearest_codes(scaled: jax.Array, signed: bool) -> jax.Array:
    """uint8 codes of the map's entries nearest to float32 values in [-1, 1].

    Entry j of decade i is 10^(i - 6) (0.1 + 0.9 (j + 1/2) / n) with n = 2^i entries, or 2^(i + 1) in the unsigned map:
    counted instead of searched for, which XLA would do in several passes over memory.
    """
    more = int(not signed)
    magnitude = jnp.abs(scaled)
    entries = dynamic_map(signed)[zero_code(signed) :].astype(np.float64)
    firsts = [2 ** (i + more) - 2**more for i in range(7)]
    # Midpoints between 0, the seven decades and 1.
    bounds = [(entries[k] + entries[k + 1]) / 2 for k in (*firsts, len(entries) - 2)]
    level = sum((magnitude > np.float32(bound)).astype(jnp.int32) for bound in bounds)
    scale, shift, first, last = (jnp.zeros_like(magnitude) for _ in range(4))
    for i, begin in enumerate(firsts):
        num = 2 ** (i + more)
        here = level == i + 1
        scale = jnp.where(here, np.float32(num / 0.9 * 10.0 ** (6 - i)), scale)
        shift = jnp.where(here, np.float32(num / 9), shift)
        first, last = jnp.where(here, np.float32(begin), first), jnp.where(here, np.float32(num - 1), last)
    inside = jnp.clip(jnp.ceil(magnitude * scale - shift) - 1, 0, last)
    # 0.0, then the decades, then 1.0, which the negative half of the signed map does not have.
    index = jnp.where(level == 0, 0, jnp.where(level == 8, len(entries) - 1, 1 + (first + inside).astype(jnp.int32)))
    if signed:
        index = zero_code(True) + jnp.where(scaled < 0, -jnp.minimum(index, zero_code(True)), index)
    return index.astype(jnp.uint8)


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

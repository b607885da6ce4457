"""Blocks of integers in plain jnp: the definition of right."""

import jax
import jax.numpy as jnp

BLOCK_SIZE = 256
LARGEST = {8: 127, 4: 7}


def quantize_reference(values: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `fastjax.kernels.int_blocks.quantize_int_blocks`."""
    blocks = values.astype(jnp.float32).reshape(-1, BLOCK_SIZE)
    absmax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # What is not finite makes the whole block NaN: it must not end as a large number.
    scale = jnp.where(jnp.isfinite(absmax), absmax, jnp.nan) * (1 / LARGEST[bits])
    codes = jnp.floor(blocks / jnp.where(scale == 0, 1.0, scale) + 0.5)
    error = blocks - codes * scale
    whole = jnp.where(jnp.isnan(codes), 0, codes).astype(jnp.int32)
    if bits == 4:
        low, high = whole[:, : BLOCK_SIZE // 2], whole[:, BLOCK_SIZE // 2 :]
        whole = low & 15 | (high & 15) << 4
        whole = jnp.where(whole > 127, whole - 256, whole)
    return whole.astype(jnp.int8).reshape(-1), scale[:, 0], error.reshape(-1)


def sum_reference(codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """See `fastjax.kernels.int_blocks.sum_int_blocks`."""
    num, blocks = scales.shape
    whole = codes.reshape(num, blocks, -1).astype(jnp.int32)
    if bits == 4:
        # Shifted up and down again, a nibble takes its sign along.
        whole = jnp.concatenate([whole << 28 >> 28, whole >> 4], axis=-1)
    values = whole.astype(jnp.float32) * scales[..., None]
    # One after the other, so that every device that sums the same parts gets the same bits.
    total = jnp.zeros_like(values[0])
    for part in values:
        total = total + part
    return total.reshape(-1)

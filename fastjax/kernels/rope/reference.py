"""Rotary positions in plain jnp: the definition of right."""

import jax
import jax.numpy as jnp


def rotate_reference(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """[B, T, N, H] with [B, T, H/2] tables: (first cos - second sin, second cos + first sin) of the two halves of H."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

"""RMSNorm in plain jnp: the definition of right."""

import jax
import jax.numpy as jnp


def rms_norm_reference(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / sqrt(mean(x^2) + eps), rounded to x's dtype before the product with the weight, and after it."""
    x32 = x.astype(jnp.float32)
    normalised = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * normalised.astype(x.dtype)

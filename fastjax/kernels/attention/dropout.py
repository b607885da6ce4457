"""Dropout bits of attention as a function of the seed and of global indices alone.

keep[b,n,t,s] = mix(mix(seed0[b,n] + t G) ^ mix(seed1[b,n] + s G)) >= rate 2^32

with mix the finaliser of MurmurHash3 (an invertible map of 32 bits) and G = 2^32 / golden ratio. Nothing is stored for
the backward, which draws the same bits again, and neither tiles nor devices change them.
"""

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9


def mix(bits: jax.Array) -> jax.Array:
    """MurmurHash3's 32-bit finaliser, uint32 to uint32."""
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> jnp.uint32(16))


def dropout_seeds(rng: jax.Array, batch: int, num_heads: int) -> jax.Array:
    """uint32 [B, N, 2] from a PRNG key: two words for every head of every row of the global batch."""
    words = jax.random.bits(rng, (2,), jnp.uint32)
    row = jnp.arange(batch, dtype=jnp.uint32)[:, None, None]
    head = jnp.arange(num_heads, dtype=jnp.uint32)[None, :, None]
    return mix(mix(words + row * jnp.uint32(_GOLDEN)) + head * jnp.uint32(_GOLDEN))


def index_bits(seed: jax.Array, index: jax.Array) -> jax.Array:
    """uint32 bits of the queries (first seed word) or keys (second) with these indices."""
    return mix(seed + index.astype(jnp.uint32) * jnp.uint32(_GOLDEN))


def keep(query_bits: jax.Array, key_bits: jax.Array, rate: float) -> jax.Array:
    """Boolean of the broadcast shape: whether a weight is kept."""
    return mix(query_bits ^ key_bits) >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))

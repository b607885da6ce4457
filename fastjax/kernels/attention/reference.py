"""Attention in plain jnp, float32, written to be read: the definition of right.

s[b,n,t,j]  = scale * q[b,t,n,:] . k[b,j,n // (N/K),:]        (softcap c: s <- c tanh(s / c))
mask        = the conditions of `attention_mask`, all of them
p           = exp(s - max_j s) / sum_j exp(s - max_j s)       over the unmasked j; a row without any gives zeros
out         = sum_j p[b,n,t,j] v[b,j,n // (N/K),:]
"""

import math

import jax
import jax.numpy as jnp


def attention_mask(
    num_queries: int,
    num_keys: int,
    *,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_lengths: jax.Array | None,
    causal: bool,
    window: int | None,
) -> jax.Array:
    """Boolean [B or 1, T, S]: True where query t may see key j.

    A query's position is its index along the keys: `positions`, or S - T + t where that is None.
    """
    key_index = jnp.arange(num_keys)[None, None, :]
    if positions is None:
        positions = (jnp.arange(num_queries) + num_keys - num_queries)[None, :]
    query_index = positions[:, :, None]
    mask = jnp.ones((1, num_queries, num_keys), bool)
    if causal:
        mask &= key_index <= query_index
    if window is not None:
        mask &= key_index > query_index - window
        if not causal:
            mask &= key_index < query_index + window
    if segment_ids is not None:
        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    if kv_lengths is not None:
        mask &= key_index < kv_lengths[:, None, None]
    return mask


def attention_reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """See `fastjax.kernels.attention.attention`; this one builds the [B, N, T, S] matrix in float32."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1], key.shape[2]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    # float32 operands must not be rounded to TF32 on a GPU; bfloat16 ones are exact in it.
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    grouped = query.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32, precision=precision)
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = attention_mask(
        num_queries,
        num_keys,
        positions=positions,
        segment_ids=segment_ids,
        kv_lengths=kv_lengths,
        causal=causal,
        window=window,
    )[:, None, None]
    # Masked scores are replaced, not lowered: a finite penalty can lose against a large real score. A row without
    # any key would give exp(-inf + inf); its maximum is taken as 0 so that it sums to 0 and divides by 1.
    scores = jnp.where(mask, scores, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    maximum = jnp.where(jnp.isfinite(maximum), maximum, 0.0)
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = weights / jnp.where(total == 0.0, 1.0, total)
    if query.dtype != jnp.float32:
        probabilities = probabilities.astype(query.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", probabilities, value, preferred_element_type=jnp.float32, precision=precision)
    return out.reshape(batch, num_queries, num_heads, head_dim).astype(query.dtype)

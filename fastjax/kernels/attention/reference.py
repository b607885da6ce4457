"""Attention in plain jnp, float32, written to be read: the definition of right.

s[b,n,t,j]  = scale * q[b,t,n,:] . k[b,j,n // (N/K),:]        (softcap c: s <- c tanh(s / c))
mask        = the conditions of `attention_mask`, all of them
lse[b,n,t]  = log sum_j exp(s)                                over the unmasked j; -inf for a row without any
p           = exp(s - lse), zeros for a row without any       (dropout: p <- p keep / (1 - rate))
out         = sum_j p[b,n,t,j] v[b,j,n // (N/K),:]
"""

import jax
import jax.numpy as jnp

from fastjax.kernels.attention.dropout import index_bits, keep
from fastjax.kernels.attention.options import Options


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
        mask &= (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] != 0)
    if kv_lengths is not None:
        mask &= key_index < kv_lengths[:, None, None]
    return mask


def attention_reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: Options,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    seeds: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse), see `fastjax.kernels.attention.attention`; this one builds the [B, N, T, S] matrix in float32.

    Args:
      seeds: [B, N, 2] uint32, for dropout.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1], key.shape[2]
    # float32 operands must not be rounded to TF32 on a GPU; bfloat16 ones are exact in it.
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    if kv_lengths is not None:
        # What lies behind a row's keys may be anything, and 0 times NaN is NaN.
        inside = (jnp.arange(num_keys) < kv_lengths[:, None])[:, :, None, None]
        key, value = jnp.where(inside, key, 0), jnp.where(inside, value, 0)
    grouped = query.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32, precision=precision)
    scores = scores * options.scale
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    mask = attention_mask(
        num_queries,
        num_keys,
        positions=positions,
        segment_ids=segment_ids,
        kv_lengths=kv_lengths,
        causal=options.causal,
        window=options.window,
    )[:, None, None]
    # Masked scores are replaced, not lowered: a finite penalty can lose against a large real score. A row without
    # any key would give exp(-inf + inf); its maximum is taken as 0 so that it sums to 0 and divides by 1.
    scores = jnp.where(mask, scores, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    maximum = jnp.where(jnp.isfinite(maximum), maximum, 0.0)
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    is_empty = total == 0.0
    total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, maximum + jnp.log(total)).reshape(batch, num_heads, num_queries)
    probabilities = weights / total
    if options.dropout_rate > 0.0 and seeds is not None:
        words = seeds.reshape(batch, num_kv_heads, -1, 2)[..., None]
        query_bits = index_bits(words[:, :, :, 0], jnp.arange(num_queries))[..., :, None]
        key_bits = index_bits(words[:, :, :, 1], jnp.arange(num_keys))[..., None, :]
        kept = keep(query_bits, key_bits, options.dropout_rate)
        probabilities = jnp.where(kept, probabilities / (1.0 - options.dropout_rate), 0.0)
    if query.dtype != jnp.float32:
        probabilities = probabilities.astype(query.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", probabilities, value, preferred_element_type=jnp.float32, precision=precision)
    return out.reshape(batch, num_queries, num_heads, head_dim).astype(query.dtype), lse

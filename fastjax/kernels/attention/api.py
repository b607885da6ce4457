"""The public attention function: input checks and choice of implementation."""

import jax
from jaxtyping import Array, Float, Int

from fastjax.kernels.attention.reference import attention_reference

_IMPLEMENTATIONS = ("reference",)


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention of every query over the keys it may see.

    out[b,t,n] = sum_j softmax_j(scale * query[b,t,n] . key[b,j,n // (N/K)]) value[b,j,n // (N/K)]

    Scores, softmax and sums are float32; the output has query's dtype. A query that may see no key gives zeros.

    Args:
      query: [B, T, N, H] float.
      key: [B, S, K, H] float; N is a multiple of K (grouped queries: head n uses key/value head n // (N/K)).
      value: [B, S, K, H] float.
      segment_ids: [B, T] int, for T == S: a query sees the keys of its own segment only.
      positions: [B, T] int, each query's index along the keys; None means S - T + t.
      causal: a query sees no key behind its position.
      window: number of keys a query may see to its left, its own position counted (as HF's `sliding_window`);
        None means all. Without `causal` the same holds to the right.
      softcap: c for scores c tanh(s / c); None means none.
      scale: multiplies the scores; None means 1/sqrt(H).
      kv_lengths: [B] int; keys from that index on are masked.
      implementation: None takes the first that can run here; a name is used or fails.
    Returns: [B, T, N, H] in query's dtype.
    Raises: ValueError for shapes that do not fit, an empty window or an unknown `implementation`.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2; grouped queries: Ainslie et al. 2023
      (arXiv:2305.13245).
    """
    _check(query, key, value, segment_ids, positions, kv_lengths, window)
    if implementation not in (None, *_IMPLEMENTATIONS):
        raise ValueError(f"implementation={implementation!r} is unknown; known: {', '.join(_IMPLEMENTATIONS)}")
    return attention_reference(
        query,
        key,
        value,
        positions=positions,
        segment_ids=segment_ids,
        kv_lengths=kv_lengths,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
    )


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    kv_lengths: jax.Array | None,
    window: int | None,
) -> None:
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError(
            f"query {query.shape}, key {key.shape}, value {value.shape}: expected [B, T, N, H] and twice [B, S, K, H]"
        )
    batch, num_queries, num_heads, head_dim = query.shape
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(f"query {query.shape} and key {key.shape} differ in batch or head size; they must be equal")
    if num_heads % key.shape[2] != 0:
        raise ValueError(
            f"{num_heads} query heads are not a multiple of {key.shape[2]} key/value heads; "
            f"use a divisor of {num_heads}"
        )
    if segment_ids is not None and segment_ids.shape != (batch, num_queries):
        raise ValueError(f"segment_ids {segment_ids.shape}: expected [B, T] = {(batch, num_queries)}")
    if segment_ids is not None and num_queries != key.shape[1]:
        raise ValueError(f"segment_ids need as many keys as queries; got T={num_queries}, S={key.shape[1]}")
    if positions is not None and positions.shape not in ((batch, num_queries), (1, num_queries)):
        raise ValueError(f"positions {positions.shape}: expected [B, T] = {(batch, num_queries)}")
    if kv_lengths is not None and kv_lengths.shape != (batch,):
        raise ValueError(f"kv_lengths {kv_lengths.shape}: expected [B] = {(batch,)}")
    if window is not None and window < 1:
        raise ValueError(f"window={window} leaves a query nothing to see; use a number >= 1, or None for no window")

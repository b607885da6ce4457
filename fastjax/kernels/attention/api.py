"""The public attention function: input checks and choice of implementation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.attention.bounds import make_tile_bounds
from fastjax.kernels.attention.cudnn import attention_cudnn, cudnn_reason
from fastjax.kernels.attention.dropout import dropout_seeds
from fastjax.kernels.attention.mosaic_gpu import attention_mosaic, mosaic_reason
from fastjax.kernels.attention.options import Options
from fastjax.kernels.attention.pallas_triton import attention_pallas
from fastjax.kernels.attention.reference import attention_reference


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "*L B S K H"],
    value: Float[Array, "*L B S K H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    rng: jax.Array | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    tile_bounds: Int[Array, "B 4 T"] | None = None,
    return_lse: bool = False,
    layer: Int[Array, ""] | int | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
    interpret: bool | None = None,
) -> Any:
    """Softmax attention of every query over the keys it may see.

    out[b,t,n] = sum_j softmax_j(scale * query[b,t,n] . key[b,j,n // (N/K)]) value[b,j,n // (N/K)]

    Scores, softmax and sums are float32; the output has query's dtype. A query that may see no key gives zeros, and
    zero gradients. No implementation but the reference holds a T x S matrix. Output and log-sum-exp carry the names
    "attn_out" and "attn_lse" for checkpoint policies; with both saved the backward does not run the forward again.

    Args:
      query: [B, T, N, H] float.
      key: [B, S, K, H] float; N is a multiple of K (grouped queries: head n uses key/value head n // (N/K)).
      value: [B, S, K, H] float.
      segment_ids: [B, T] int, for T == S: a query sees the keys of its own segment only; 0 is padding, which sees
        nothing and is not seen.
      positions: [B, T] or [1, T] int, each query's index along the keys; None means S - T + t.
      causal: a query sees no key behind its position.
      window: number of keys a query may see to its left, its own position counted (as HF's `sliding_window`);
        None means all. Without `causal` the same holds to the right.
      softcap: c for scores c tanh(s / c); None means none.
      scale: multiplies the scores, above 0; None means 1/sqrt(H).
      dropout_rate: share of the softmax weights that are dropped, in [0, 1); the others are divided by 1 - rate.
      rng: PRNG key of the dropout, needed with it. What is dropped depends on the key and on the indices of row, head,
        query and key alone. Under a mesh `sharded_attention` keeps those indices global.
      kv_lengths: [B] int; keys from that index on are masked, whatever they hold.
      tile_bounds: `make_tile_bounds(segment_ids)`, to be computed once a batch where many layers share it; None
        computes it here.
      return_lse: whether to return the log of the sum of exp(scores) too, natural, -inf for a query without keys.
      layer: key and value are [L, B, S, K, H], and this index of them is read where it lies. No gradient.
      max_segments: the most documents of a row, which only "cudnn" needs to know; see there.
      implementation: "pallas_triton", "mosaic_gpu", "cudnn" or "reference"; None takes the fastest that can run here,
        by measurement; a name is used or fails. "mosaic_gpu" is for dense rows on Hopper. cuDNN takes packed rows only
        where each document lies in one piece and a row has at most `max_segments`; other rows give NaN there.
      interpret: run Pallas kernels in jax's interpreter, on any device; None means no.
    Returns: [B, T, N, H] in query's dtype; with return_lse also [B, N, T] float32.
    Raises: ValueError for shapes that do not fit, settings out of range or an unknown `implementation`;
      NotImplementedError if `implementation` cannot do this here.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2; FlashAttention-2 (arXiv:2307.08691); grouped queries:
      Ainslie et al. 2023 (arXiv:2305.13245).
    """
    _check(query, key, value, segment_ids, positions, kv_lengths, tile_bounds, layer)
    _check_settings(window, scale, dropout_rate, rng)
    options = Options(
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_rate=dropout_rate,
    )
    masks: dict[str, Any] = {"segment_ids": segment_ids, "positions": positions, "kv_lengths": kv_lengths}
    reasons = {
        "cudnn": _cudnn_reason(query, key, options, masks, return_lse, layer, max_segments),
        "mosaic_gpu": _mosaic_reason(query, key, options, masks, layer, bool(interpret)),
        "pallas_triton": _pallas_reason(query, bool(interpret)),
        "reference": None,
    }
    if segment_ids is not None or interpret:
        reasons = {name: reasons[name] for name in ("pallas_triton", "cudnn", "mosaic_gpu", "reference")}
    implementation = choose("attention", implementation, reasons)
    if implementation == "cudnn":
        assert not return_lse
        return attention_cudnn(query, key, value, options, segment_ids=segment_ids, max_segments=max_segments or 0)
    if implementation == "mosaic_gpu":
        return attention_mosaic(query, key, value, options, return_lse)
    seeds = None
    if dropout_rate > 0.0 and rng is not None:
        seeds = rng if _is_seeds(rng) else dropout_seeds(rng, query.shape[0], query.shape[2])
    if implementation == "pallas_triton":
        if segment_ids is not None and tile_bounds is None:
            tile_bounds = make_tile_bounds(segment_ids)
        return attention_pallas(
            query,
            key,
            value,
            options,
            **masks,
            tile_bounds=tile_bounds,
            seeds=seeds,
            layer=layer,
            return_lse=return_lse,
            interpret=bool(interpret),
        )
    if layer is not None:
        key, value = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (key, value))
    out, lse = attention_reference(query, key, value, options, **masks, seeds=seeds)
    out = checkpoint_name(out, "attn_out")
    return (out, lse) if return_lse else out


def _is_seeds(rng: jax.Array) -> bool:
    """Whether these are `dropout_seeds` already, as `sharded_attention` passes them."""
    return rng.ndim == 3 and rng.dtype == jnp.uint32


def _pallas_reason(query: jax.Array, interpret: bool) -> str | None:
    if query.shape[-1] > 256:
        return f"takes head sizes up to 256, and this one is {query.shape[-1]}"
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"takes bfloat16, float16 and float32, and query is {query.dtype}"
    return triton_reason(interpret)


def _mosaic_reason(query, key, options: Options, masks, layer, interpret: bool) -> str | None:
    for name, array in masks.items():
        if array is not None:
            return f"takes no {name}"
    if layer is not None:
        return "takes key and value of one layer only"
    if interpret:
        return "cannot be interpreted"
    return mosaic_reason(query, key, options)


def _cudnn_reason(query, key, options: Options, masks, return_lse: bool, layer, max_segments) -> str | None:
    for name in ("positions", "kv_lengths"):
        if masks[name] is not None:
            return f"takes no {name}"
    if return_lse:
        return "gives no log-sum-exp with a gradient"
    if layer is not None:
        return "takes key and value of one layer only"
    is_packed = masks["segment_ids"] is not None
    if is_packed and not max_segments:
        return "needs max_segments for packed rows"
    return cudnn_reason(query, key, options, is_packed=is_packed)


def _check_settings(window: int | None, scale: float | None, dropout_rate: float, rng: jax.Array | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window={window} leaves a query nothing to see; use a number >= 1, or None for no window")
    if scale is not None and not scale > 0.0:
        raise ValueError(f"scale={scale} must be above 0; None means 1/sqrt(H)")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate={dropout_rate} must lie in [0, 1)")
    if dropout_rate > 0.0 and rng is None:
        raise ValueError(f"dropout_rate={dropout_rate} needs rng, a PRNG key")


def _check(query, key, value, segment_ids, positions, kv_lengths, tile_bounds, layer) -> None:
    num_dims = 4 if layer is None else 5
    if query.ndim != 4 or key.ndim != num_dims or key.shape != value.shape:
        expected = "[B, S, K, H]" if layer is None else "[L, B, S, K, H] (with layer)"
        raise ValueError(
            f"query {query.shape}, key {key.shape}, value {value.shape}: expected [B, T, N, H] and twice {expected}"
        )
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[-3:-1]
    if key.shape[-4] != batch or key.shape[-1] != head_dim:
        raise ValueError(f"query {query.shape} and key {key.shape} differ in batch or head size; they must be equal")
    if num_heads % num_kv_heads != 0:
        raise ValueError(
            f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads; "
            f"use a divisor of {num_heads}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; they must be of one dtype")
    if segment_ids is not None and segment_ids.shape != (batch, num_queries):
        raise ValueError(f"segment_ids {segment_ids.shape}: expected [B, T] = {(batch, num_queries)}")
    if segment_ids is not None and num_queries != num_keys:
        raise ValueError(f"segment_ids need as many keys as queries; got T={num_queries}, S={num_keys}")
    if tile_bounds is not None and (segment_ids is None or tile_bounds.shape != (batch, 4, num_queries)):
        raise ValueError(
            f"tile_bounds {tile_bounds.shape}: expected make_tile_bounds(segment_ids) of the segment_ids that are given"
        )
    if positions is not None and positions.shape not in ((batch, num_queries), (1, num_queries)):
        raise ValueError(f"positions {positions.shape}: expected [B, T] = {(batch, num_queries)}")
    if kv_lengths is not None and kv_lengths.shape != (batch,):
        raise ValueError(f"kv_lengths {kv_lengths.shape}: expected [B] = {(batch,)}")

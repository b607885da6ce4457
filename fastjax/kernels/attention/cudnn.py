"""Attention through cuDNN, by what lies behind `jax.nn.dot_product_attention`; no other file knows jax's names there.

jax's own rules are called inside a custom_vjp of ours, so that output and log-sum-exp carry the names that checkpoint
policies save. Packed rows are described to cuDNN by where each document begins and how long it is.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fastjax.kernels._dispatch import target_device, target_is_gpu
from fastjax.kernels.attention.options import Options


def _jax_module() -> ModuleType:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def cudnn_reason(query: jax.Array, key: jax.Array, options: Options, *, is_packed: bool) -> str | None:
    """Why cuDNN cannot do this call here; None if it can. Masks made of arrays are refused by the caller."""
    num_queries, num_heads, head_dim = query.shape[1:]
    if not target_is_gpu() or jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU in this process"
    try:
        _jax_module().check_cudnn_version()
    except Exception as error:
        return f"needs cuDNN ({error})"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, and query is {query.dtype}"
    capability = float(getattr(target_device(), "compute_capability", 8.0))
    longest_head = 256 if capability >= 9.0 else 128
    if head_dim % 8 != 0 or head_dim > longest_head:
        return f"takes head sizes that are multiples of 8 up to {longest_head} on this GPU, and this one is {head_dim}"
    if options.causal and num_queries != key.shape[1]:
        return f"aligns a causal mask with the first key, so T={num_queries} and S={key.shape[1]} must be equal"
    if options.window is not None and not options.causal:
        return "takes a window with a causal mask only"
    if options.softcap is not None:
        return "has no soft cap"
    if options.dropout_rate > 0.0:
        return "would drop other weights than the other implementations"
    if is_packed and capability < 9.0:
        return f"takes packed rows from compute capability 9.0 on; {target_device().device_kind} has {capability}"
    if is_packed and num_heads != key.shape[2] and not hasattr(_jax_module(), "_canonical_bnth_shape"):
        return f"finds the wrong keys of packed rows with grouped heads in jax {jax.__version__}; 0.11 has it right"
    return None


def attention_cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: Options,
    *,
    segment_ids: jax.Array | None = None,
    max_segments: int = 0,
) -> jax.Array:
    """See `fastjax.kernels.attention.attention`.

    Args:
      max_segments: for packed rows, the most documents that one may hold. A row with more, or with a document in
        several pieces, gives NaN.
    """
    if segment_ids is None:
        return _attention(query, key, value, None, options)
    offsets, lengths, is_right = _documents(segment_ids, max_segments)
    inside = (segment_ids != 0)[:, :, None, None]
    # What cuDNN writes for padding is not defined, in the output and in the gradients alike.
    query, key, value = (jnp.where(inside, x, 0) for x in (query, key, value))
    out = jnp.where(inside, _attention(query, key, value, (offsets, lengths), options), 0)
    return jnp.where(is_right[:, None, None, None], out, jnp.nan)


def _documents(segment_ids: jax.Array, max_segments: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Offsets [B, M + 1] and lengths [B, M] of each row's runs, -1 where there are fewer, and whether that is all."""
    length = segment_ids.shape[1]

    def one_row(ids: jax.Array):
        changes = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
        (starts,) = jnp.nonzero(changes & (ids != 0), size=max_segments + 1, fill_value=-1)
        (all_starts,) = jnp.nonzero(changes, size=length, fill_value=length)
        ends = all_starts[jnp.minimum(jnp.searchsorted(all_starts, starts, side="right"), length - 1)]
        ends = jnp.where(ends > starts, ends, length)
        lengths = jnp.where(starts >= 0, ends - starts, -1)[:max_segments]
        run_ids = jnp.sort(jnp.where(changes, ids, 0))
        repeated = jnp.any((run_ids[1:] == run_ids[:-1]) & (run_ids[1:] != 0))
        return starts.astype(jnp.int32), lengths.astype(jnp.int32), ~repeated & (starts[max_segments] < 0)

    return jax.vmap(one_row)(segment_ids)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(query, key, value, documents, options: Options) -> jax.Array:
    return _forward(query, key, value, documents, options)[0]


def _forward(query, key, value, documents, options: Options):
    empty = jnp.zeros(0, query.dtype)
    offsets, lengths = documents if documents is not None else (empty, empty)
    named = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
    arrays = {"query": query, "key": key, "value": value, "bias": empty, "page_table_k": empty, "page_table_v": empty}
    rule = _jax_module()._dot_product_attention_fwd_rule
    _, residuals = _call(rule, _settings(options, documents is not None), {**arrays, **named})
    *inputs, lse, out = residuals
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (*inputs, lse, out)


def cudnn_gradients(query, key, value, out, lse, dout, options: Options) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dquery, dkey, dvalue) of dense attention whose output and log-sum-exp [B, N, T] another forward gave."""
    module = _jax_module()
    rule = inspect.signature(module._dot_product_attention_fwd_rule).parameters
    # bias, lengths and offsets of queries and keys, page tables, and in jax 0.12 arguments of a score function.
    absent = [jnp.zeros(0, query.dtype)] * 7 + [()] * ("score_mod_args" in rule)
    return _backward(options, (query, key, value, *absent, lse, out), dout)[:3]


def _backward(options: Options, residuals, dout):
    is_packed = residuals[6].size > 0
    arrays = {"res": residuals, "grad_output": dout}
    rule = _jax_module()._dot_product_attention_bwd_rule
    dquery, dkey, dvalue, *_ = _call(rule, _settings(options, is_packed), arrays)
    return dquery, dkey, dvalue, None


_attention.defvjp(_forward, _backward)


def _settings(options: Options, is_packed: bool) -> dict[str, Any]:
    masks = _jax_module().MaskType
    kinds = {
        (False, False): masks.NO_MASK,
        (True, False): masks.CAUSAL,
        (False, True): masks.PADDING,
        (True, True): masks.PADDING_CAUSAL,
    }
    return {
        "scale": options.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": kinds[options.causal, is_packed],
        "layout": _jax_module().AttentionLayout.BTNH.value,
        "sliding_window_length": options.window,
        "cudnn_version": _jax_module().check_cudnn_version(),
        "is_training": True,
        "return_residual": False,
        # jax 0.12 added these two.
        "score_mod": None,
        "score_mod_args": (),
    }


def _call(rule: Callable, settings: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """`rule` with those of its arguments, which differ between versions of jax."""
    known = {**settings, **arrays}
    return rule(**{name: known[name] for name in inspect.signature(rule).parameters})

"""Dense attention on Hopper: a Mosaic GPU forward, and the gradient that joins it with the backward of another.

Output and log-sum-exp carry the names that checkpoint policies save. The backward is cuDNN's, which is the fastest one,
where it can run and nobody asks for the gradient of the log-sum-exp; otherwise the Triton kernels'.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fastjax.kernels._dispatch import target_device, target_is_gpu
from fastjax.kernels.attention.blocks import mosaic_tiles
from fastjax.kernels.attention.cudnn import cudnn_gradients, cudnn_reason
from fastjax.kernels.attention.options import Options

# CUDA's assembler of these versions miscompiles such kernels (jax's own example refuses them too).
_BROKEN_CUDA = range(12080, 12091)


def _cuda_version() -> int:
    from jax._src.lib import cuda_versions

    return 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


def mosaic_reason(query: jax.Array, key: jax.Array, options: Options) -> str | None:
    """Why this kernel cannot do this call here; None if it can. Masks made of arrays are refused by the caller."""
    num_queries, head_dim = query.shape[1], query.shape[3]
    num_keys = key.shape[1]
    if not target_is_gpu() or jax.default_backend() != "gpu":
        return "needs a Hopper GPU in this process"
    capability = str(getattr(target_device(), "compute_capability", None))
    if capability != "9.0":
        return f"needs compute capability 9.0 (Hopper); {target_device().device_kind} has {capability}"
    if _cuda_version() in _BROKEN_CUDA:
        return "is miscompiled by CUDA 12.8 and 12.9.0; install 12.9.1 or later"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, and query is {query.dtype}"
    if head_dim not in (64, 128, 256):
        return f"takes head sizes 64, 128 and 256, and this one is {head_dim}"
    if num_queries % 8 != 0 or num_keys % 8 != 0:
        return f"takes lengths that are multiples of 8, and these are T={num_queries} and S={num_keys}"
    if options.causal and num_queries != num_keys:
        return f"takes a causal mask over as many keys as queries only, and these are T={num_queries} and S={num_keys}"
    for name in ("window", "softcap"):
        if getattr(options, name) is not None:
            return f"takes no {name}"
    if options.dropout_rate > 0.0:
        return "has no dropout"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention_mosaic(
    query: jax.Array, key: jax.Array, value: jax.Array, options: Options, return_lse: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `fastjax.kernels.attention.attention`."""
    return _forward(query, key, value, options, return_lse)[0]


def _forward(query, key, value, options: Options, return_lse: bool):
    # Takes a third of a second, and only Hopper needs it.
    from fastjax.kernels.attention.mosaic_gpu_forward import forward_mosaic

    out, lse = forward_mosaic(query, key, value, options, mosaic_tiles(query.shape[-1]))
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return (out, lse) if return_lse else out, (query, key, value, out, lse)


def _backward(options: Options, return_lse: bool, residuals, cotangents):
    query, key, value, out, lse = residuals
    if not return_lse and cudnn_reason(query, key, options, is_packed=False) is None:
        return cudnn_gradients(query, key, value, out, lse, cotangents, options)
    # The one thing here that needs Pallas' Triton backend.
    from fastjax.kernels.attention.pallas_triton import plan_for
    from fastjax.kernels.attention.pallas_triton_backward import backward_pallas, delta_pallas

    dout, dlse = cotangents if return_lse else (cotangents, None)
    plan = plan_for(query, key, splits_keys=False, num_seen=0, interpret=False)
    delta = delta_pallas(out, dout, dlse)
    return backward_pallas(query, key, value, dout, lse, delta, {}, options, plan.dkey_dvalue, plan.dquery)


attention_mosaic.defvjp(_forward, _backward)

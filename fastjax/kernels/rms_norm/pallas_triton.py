"""RMSNorm as Pallas-Triton kernels: one pass over memory forward, one backward.

With r = 1 / sqrt(mean(s^2) + eps), n = s r and y = w n, a row's gradient is

    ds = r (w dy - n mean(n w dy))          dw = sum over rows of dy n

to which the gradient of the sum itself is added where there is a residual. The row stays in registers between the
reduction and its use. dw is left to XLA, and costs nothing where the weight is frozen.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.rms_norm.blocks import Tiles, rms_norm_tiles


def _place(num_rows: int, width: int, tiles: Tiles):
    """(row and column indices, mask or None, mask of the columns or None) of this program's tile."""
    row = jnp.minimum(pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows), num_rows - 1)
    column = jnp.arange(tiles.columns)
    inside = column < width
    mask = None if width == tiles.columns else jnp.broadcast_to(inside, (tiles.rows, tiles.columns))
    return (row[:, None], column[None, :]), mask, None if mask is None else inside


def _load(ref, index, mask):
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)


def _forward_kernel(*refs, shape: tuple[int, int], eps: float, tiles: Tiles):
    """Refs: x, [residual,] weight; [sum,] y. Programs past the end do the last row again."""
    has_residual = len(refs) == 5
    index, mask, inside = _place(*shape, tiles)
    total = _load(refs[0], index, mask)
    if has_residual:
        total = total + _load(refs[1], index, mask)
        plgpu.store(refs[3].at[index], total, mask=mask)
    weight_ref, y_ref = (refs[2], refs[4]) if has_residual else (refs[1], refs[2])
    total32 = total.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.sum(total32 * total32, axis=1) / shape[1] + eps)
    normalised = (total32 * rstd[:, None]).astype(total.dtype)
    weight = plgpu.load(weight_ref.at[index[1][0]], mask=inside, other=None if inside is None else 0)
    plgpu.store(y_ref.at[index], weight.astype(total.dtype)[None, :] * normalised, mask=mask)


def _backward_kernel(*refs, shape: tuple[int, int], eps: float, tiles: Tiles):
    """Refs: sum, weight, dy[, dsum]; dx."""
    sum_ref, weight_ref, dy_ref, *dsum_ref, dx_ref = refs
    index, mask, inside = _place(*shape, tiles)
    total = _load(sum_ref, index, mask).astype(jnp.float32)
    weight = plgpu.load(weight_ref.at[index[1][0]], mask=inside, other=None if inside is None else 0)
    scaled = _load(dy_ref, index, mask).astype(jnp.float32) * weight.astype(dx_ref.dtype).astype(jnp.float32)[None, :]
    rstd = jax.lax.rsqrt(jnp.sum(total * total, axis=1) / shape[1] + eps)[:, None]
    normalised = total * rstd
    dx = rstd * (scaled - normalised * (jnp.sum(normalised * scaled, axis=1) / shape[1])[:, None])
    if dsum_ref:
        dx = dx + _load(dsum_ref[0], index, mask).astype(jnp.float32)
    plgpu.store(dx_ref.at[index], dx.astype(dx_ref.dtype), mask=mask)


def _call(kernel, name: str, num_outputs: int, operands, eps: float, interpret: bool):
    rows = operands[0]
    tiles = rms_norm_tiles(rows.shape[1])
    like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    return pl.pallas_call(
        partial(kernel, shape=rows.shape, eps=eps, tiles=tiles),
        out_shape=(like,) * num_outputs,
        grid=(pl.cdiv(rows.shape[0], tiles.rows),),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm_pallas(x: jax.Array, weight: jax.Array, eps: float, interpret: bool) -> jax.Array:
    """[rows, D] and [D] to [rows, D]; see `fastjax.kernels.rms_norm.rms_norm`."""
    return _call(_forward_kernel, "rms_norm", 1, (x, weight), eps, interpret)[0]


def _norm_forward(x, weight, eps, interpret):
    return rms_norm_pallas(x, weight, eps, interpret), (x, weight)


def _norm_backward(eps, interpret, residuals, dy):
    x, weight = residuals
    dx = _call(_backward_kernel, "rms_norm_backward", 1, (x, weight, dy), eps, interpret)[0]
    return dx, _weight_gradient(x, weight, dy, eps)


rms_norm_pallas.defvjp(_norm_forward, _norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def keep_rms_norm_pallas(x: jax.Array, weight: jax.Array, eps: float, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """[rows, D] and [D] to (x, norm of x): the backward adds the gradients of both in one pass."""
    return x, rms_norm_pallas(x, weight, eps, interpret)


def _keep_forward(x, weight, eps, interpret):
    return keep_rms_norm_pallas(x, weight, eps, interpret), (x, weight)


def _keep_backward(eps, interpret, residuals, cotangents):
    (x, weight), (dx, dy) = residuals, cotangents
    total = add_rms_norm_backward_pallas(x, weight, dx, dy, eps, interpret)
    return total, _weight_gradient(x, weight, dy, eps)


keep_rms_norm_pallas.defvjp(_keep_forward, _keep_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def add_rms_norm_pallas(
    x: jax.Array, residual: jax.Array, weight: jax.Array, eps: float, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """[rows, D] twice and [D] to (sum, norm of the sum); see `fastjax.kernels.rms_norm.rms_norm`."""
    total, y = _call(_forward_kernel, "add_rms_norm", 2, (x, residual, weight), eps, interpret)
    return total, y


def add_rms_norm_backward_pallas(
    total: jax.Array, weight: jax.Array, dtotal: jax.Array, dy: jax.Array, eps: float, interpret: bool
) -> jax.Array:
    """[rows, D], the gradient of both terms of the sum, from those of the sum and of its norm."""
    return _call(_backward_kernel, "add_rms_norm_backward", 1, (total, weight, dy, dtotal), eps, interpret)[0]


def _add_forward(x, residual, weight, eps, interpret):
    total, y = add_rms_norm_pallas(x, residual, weight, eps, interpret)
    total = checkpoint_name(total, "mid")
    return (total, y), (total, weight)


def _add_backward(eps, interpret, residuals, cotangents):
    total, weight = residuals
    dtotal, dy = cotangents
    dx = add_rms_norm_backward_pallas(total, weight, dtotal, dy, eps, interpret)
    return dx, dx, _weight_gradient(total, weight, dy, eps)


add_rms_norm_pallas.defvjp(_add_forward, _add_backward)


def _weight_gradient(total, weight, dy, eps):
    total32 = total.astype(jnp.float32)
    normalised = total32 * jax.lax.rsqrt(jnp.mean(jnp.square(total32), axis=-1, keepdims=True) + eps)
    return jnp.sum(dy.astype(jnp.float32) * normalised, axis=0).astype(weight.dtype)

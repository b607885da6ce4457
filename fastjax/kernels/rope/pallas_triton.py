"""Rotary positions as a Pallas-Triton kernel: one pass over queries and keys together.

A rotation's gradient is the rotation by the opposite angle: the same kernel with -sin.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_NUM_WARPS = 4


def _kernel(query_ref, key_ref, cos_ref, sin_ref, query_out, key_out, *, half: int, sign: float):
    """Owns one token: all its heads, as [heads, half] twice, heads and half filled up to powers of two."""
    token = pl.program_id(0)
    column = jnp.arange(pl.next_power_of_2(half))
    inside = column < half
    cos = plgpu.load(cos_ref.at[token, column], mask=inside, other=0.0)[None, :]
    sin = plgpu.load(sin_ref.at[token, column], mask=inside, other=0.0)[None, :] * sign
    for source, target in ((query_ref, query_out), (key_ref, key_out)):
        num_heads = source.shape[1]
        head = jnp.arange(pl.next_power_of_2(num_heads))
        mask = (head < num_heads)[:, None] & inside[None, :]
        if num_heads == len(head) and half == len(column):
            mask = None
        other = None if mask is None else 0
        places = [(token, head[:, None], column[None, :] + start) for start in (0, half)]
        first, second = (plgpu.load(source.at[at], mask=mask, other=other).astype(jnp.float32) for at in places)
        plgpu.store(target.at[places[0]], (first * cos - second * sin).astype(target.dtype), mask=mask)
        plgpu.store(target.at[places[1]], (second * cos + first * sin).astype(target.dtype), mask=mask)


def _rotate(query, key, cos, sin, sign: float, interpret: bool):
    num_tokens = query.shape[0] * query.shape[1]
    operands = [x.reshape(num_tokens, *x.shape[2:]) for x in (query, key, cos, sin)]
    turned = pl.pallas_call(
        partial(_kernel, half=cos.shape[-1], sign=sign),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:2]),
        grid=(num_tokens,),
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="rope",
    )(*operands)
    return turned[0].reshape(query.shape), turned[1].reshape(key.shape)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def rope_pallas(
    query: jax.Array, key: jax.Array, cos: jax.Array, sin: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See `fastjax.kernels.rope.rope`."""
    return _rotate(query, key, cos, sin, 1.0, interpret)


def _forward(query, key, cos, sin, interpret):
    return rope_pallas(query, key, cos, sin, interpret), (cos, sin)


def _backward(interpret, tables, cotangents):
    (cos, sin), (dquery, dkey) = tables, cotangents
    return (*_rotate(dquery, dkey, cos, sin, -1.0, interpret), None, None)


rope_pallas.defvjp(_forward, _backward)

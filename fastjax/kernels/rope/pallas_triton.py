"""Rotary positions as Pallas-Triton kernels: one pass over queries and keys together.

A rotation's gradient is the rotation by the opposite angle: the same kernel with -sin. Queries, keys and values that
lie side by side, as one matmul writes them, are taken apart in that pass, and their gradients put side by side.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_NUM_WARPS = 4


def _turn(sources, targets, token, cos_ref, sin_ref, *, half: int, sign: float):
    """Turns a token's heads: [heads, half] twice, heads and half filled up to powers of two.

    Args:
      sources, targets: of each kind of heads (place, number of heads), where place(head, column) is what is loaded from
        or stored to.
    """
    column = jnp.arange(pl.next_power_of_2(half))
    inside = column < half
    cos = plgpu.load(cos_ref.at[token, column], mask=inside, other=0.0)[None, :]
    sin = plgpu.load(sin_ref.at[token, column], mask=inside, other=0.0)[None, :] * sign
    for (source, num_heads), (target, _) in zip(sources, targets, strict=True):
        head = jnp.arange(pl.next_power_of_2(num_heads))
        mask = (head < num_heads)[:, None] & inside[None, :]
        if num_heads == len(head) and half == len(column):
            mask = None
        other = None if mask is None else 0
        places = [(head[:, None], column[None, :] + start) for start in (0, half)]
        first, second = (plgpu.load(source(*at), mask=mask, other=other).astype(jnp.float32) for at in places)
        to_first, to_second = (target(*at) for at in places)
        plgpu.store(to_first, (first * cos - second * sin).astype(to_first.dtype), mask=mask)
        plgpu.store(to_second, (second * cos + first * sin).astype(to_second.dtype), mask=mask)


def _of_heads(ref, token):
    """(place, number of heads) of [tokens, heads, size]."""
    return lambda head, column: ref.at[token, head, column], ref.shape[1]


def _of_columns(ref, token, first: int, num_heads: int, size: int):
    """(place, number of heads) of heads side by side from column `first` on."""
    return lambda head, column: ref.at[token, first + head * size + column], num_heads


def _kernel(query_ref, key_ref, cos_ref, sin_ref, query_out, key_out, *, half: int, sign: float):
    """Owns one token: all its heads."""
    token = pl.program_id(0)
    sources, targets = (
        [_of_heads(ref, token) for ref in refs] for refs in ((query_ref, key_ref), (query_out, key_out))
    )
    _turn(sources, targets, token, cos_ref, sin_ref, half=half, sign=sign)


def _joined_kernel(*refs, half: int, heads: tuple[int, int], backward: bool):
    """Owns one token. Refs: joined, cos, sin; query, key, value. Backward: query, key, value, cos, sin; joined."""
    if backward:
        query_ref, key_ref, value_ref, cos_ref, sin_ref, joined_ref = refs
    else:
        joined_ref, cos_ref, sin_ref, query_ref, key_ref, value_ref = refs
    token = pl.program_id(0)
    size, (num_heads, num_kv_heads) = 2 * half, heads
    apart = [_of_heads(ref, token) for ref in (query_ref, key_ref)]
    joined = [
        _of_columns(joined_ref, token, 0, num_heads, size),
        _of_columns(joined_ref, token, num_heads * size, num_kv_heads, size),
    ]
    sources, targets = (apart, joined) if backward else (joined, apart)
    _turn(sources, targets, token, cos_ref, sin_ref, half=half, sign=-1.0 if backward else 1.0)
    width = num_kv_heads * size
    column = jnp.arange(pl.next_power_of_2(width))
    mask = None if len(column) == width else column < width
    places = [joined_ref.at[token, (num_heads + num_kv_heads) * size + column], value_ref.at[token, column]]
    source, target = reversed(places) if backward else places
    plgpu.store(target, plgpu.load(source, mask=mask, other=None if mask is None else 0), mask=mask)


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


def _joined_call(operands, out_shape, heads: tuple[int, int], half: int, backward: bool, interpret: bool):
    return pl.pallas_call(
        partial(_joined_kernel, half=half, heads=heads, backward=backward),
        out_shape=out_shape,
        grid=(len(operands[0]),),
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="rope_joined_backward" if backward else "rope_joined",
    )(*operands)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def rope_joined_pallas(
    joined: jax.Array, cos: jax.Array, sin: jax.Array, heads: tuple[int, int], interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `fastjax.kernels.rope.rope_joined`."""
    batch, length, columns = joined.shape
    half, num_tokens, (num_heads, num_kv_heads) = cos.shape[-1], batch * length, heads
    operands = (joined.reshape(num_tokens, columns), cos.reshape(num_tokens, half), sin.reshape(num_tokens, half))
    shapes = ((num_heads, 2 * half), (num_kv_heads, 2 * half), (num_kv_heads * 2 * half,))
    out_shape = tuple(jax.ShapeDtypeStruct((num_tokens, *shape), joined.dtype) for shape in shapes)
    query, key, value = _joined_call(operands, out_shape, heads, half, False, interpret)
    shape = (batch, length, -1, 2 * half)
    return query.reshape(shape), key.reshape(shape), value.reshape(shape)


def _joined_forward(joined, cos, sin, heads, interpret):
    return rope_joined_pallas(joined, cos, sin, heads, interpret), (cos, sin)


def _joined_backward(heads, interpret, tables, cotangents):
    cos, sin = tables
    batch, length, half = cos.shape
    num_tokens = batch * length
    dquery, dkey, dvalue = cotangents
    operands = (
        dquery.reshape(num_tokens, *dquery.shape[2:]),
        dkey.reshape(num_tokens, *dkey.shape[2:]),
        dvalue.reshape(num_tokens, -1),
        cos.reshape(num_tokens, half),
        sin.reshape(num_tokens, half),
    )
    columns = (heads[0] + 2 * heads[1]) * 2 * half
    out_shape = jax.ShapeDtypeStruct((num_tokens, columns), dquery.dtype)
    djoined = _joined_call(operands, out_shape, heads, half, True, interpret)
    return djoined.reshape(batch, length, columns), None, None


rope_joined_pallas.defvjp(_joined_forward, _joined_backward)

"""The backward kernels: delta, then dk and dv, then dq.

With p = exp(s - lse) recomputed tile by tile, s = scale q . k^T (soft cap: s = c tanh(scale q . k^T / c)):

    dv = p^T . dout                  dp = dout . v^T
    ds = p (dp - delta)              delta = sum_j p_j dp_j - dlse = dout . out - dlse
    dq = scale ds . k                dk = scale ds^T . q           (soft cap: ds <- ds (1 - (s / c)^2))

Dropout multiplies p in dv, and dp, by keep / (1 - rate); delta stays dout . out. One pass goes over keys and sums dk
and dv over queries and over the heads of a group, the other goes over queries and sums dq over keys: seven products in
place of five, and neither atomic additions nor an order that differs from run to run. Sums are float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.attention.blocks import Tiles
from fastjax.kernels.attention.options import Options
from fastjax.kernels.attention.pallas_triton_dkey_dvalue import dkey_dvalue_pallas
from fastjax.kernels.attention.pallas_triton_dquery import dquery_pallas
from fastjax.kernels.attention.pallas_triton_parts import (
    Call,
    load_rows,
)

_DELTA_ROWS = 64


def _delta_kernel(out_ref, dout_ref, dlse_ref, delta_ref, *, call: Call):
    """Owns call.rows queries of one head."""
    row = pl.program_id(1) * call.rows + jnp.arange(call.rows)
    inside = row < call.num_queries
    out = load_rows(out_ref, ..., call, inside).astype(jnp.float32)
    dout = load_rows(dout_ref, ..., call, inside).astype(jnp.float32)
    delta = jnp.sum(out * dout, axis=1)
    if dlse_ref is not None:
        delta -= plgpu.load(dlse_ref, mask=inside, other=0.0)
    plgpu.store(delta_ref, delta, mask=inside)


def delta_pallas(out, dout, dlse, *, interpret: bool = False) -> jax.Array:
    """[B, N, T] float32: dout . out, less the gradient of lse [B, N, T] where there is one."""
    batch, num_queries, num_heads, head_dim = out.shape
    call = Call(Options(scale=1.0), num_queries, 0, head_dim, 1, _DELTA_ROWS, 1, False, interpret)
    of_rows = pl.BlockSpec((None, call.rows, None, call.padded_head), lambda n, t, b: (b, t, n, 0))
    of_numbers = pl.BlockSpec((None, None, call.rows), lambda n, t, b: (b, n, t))
    return pl.pallas_call(
        partial(_delta_kernel, call=call),
        out_shape=jax.ShapeDtypeStruct((batch, num_heads, num_queries), jnp.float32),
        grid=(num_heads, call.padded_queries // call.rows, batch),
        in_specs=[of_rows, of_rows, None if dlse is None else of_numbers],
        out_specs=of_numbers,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attention_delta",
    )(out, dout, dlse)


def backward_pallas(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    arrays: dict[str, jax.Array],
    options: Options,
    key_tiles: Tiles,
    query_tiles: Tiles,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dquery, dkey, dvalue) in the dtypes of query, key and value."""
    operands = (query, key, value, dout, lse, delta, arrays)
    dkey, dvalue = dkey_dvalue_pallas(*operands, options, key_tiles, interpret=interpret)
    return dquery_pallas(*operands, options, query_tiles, interpret=interpret), dkey, dvalue

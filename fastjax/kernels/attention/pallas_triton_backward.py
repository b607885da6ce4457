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
from fastjax.kernels.attention.pallas_triton_parts import (
    LOG2_E,
    Call,
    cap_slope,
    capped,
    dropped,
    head_sections,
    key_bits,
    key_limit,
    keys_to_visit,
    load_rows,
    load_segments,
    mask_specs,
    needs_mask,
    pair_mask,
    queries_to_visit,
    query_bits,
    query_positions,
    store_rows,
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


def _statistics(lse: jax.Array, inside: jax.Array | None) -> jax.Array:
    """lse in base 2; infinite, which makes every weight 0, for rows without keys and outside of the array."""
    absent = lse == -jnp.inf
    if inside is not None:
        absent |= ~inside
    return jnp.where(absent, jnp.inf, lse * LOG2_E)


def _load_numbers(ref, index, inside: jax.Array | None) -> jax.Array:
    if inside is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=inside, other=0.0)


def _keys_kernel(
    query_ref, key_ref, value_ref, dout_ref, lse_ref, delta_ref, refs, dkey_ref, dvalue_ref, *, call: Call
):
    """Owns call.keys keys of one key/value head, for all query heads of its group; everything is transposed.

    query_ref, dout_ref [T, group, H]; key_ref, value_ref [keys, H]; lse_ref, delta_ref [group, T].
    """
    first_key = pl.program_id(1) * call.keys
    index = first_key + jnp.arange(call.keys)
    limit = key_limit(call, refs)
    visit = queries_to_visit(call, refs, first_key)
    whole = call.num_keys % call.keys == 0 and "kv_lengths" not in refs
    key = load_rows(key_ref, ..., call, None if whole else index < limit)
    value = load_rows(value_ref, ..., call, None if whole else index < limit)
    segments = load_segments(refs, index, call.num_keys)[:, None] if "segment_ids" in refs else None

    def step(head: jax.Array, tile: jax.Array, carry, *, masked: bool):
        dkey, dvalue = carry
        row = tile * call.rows + jnp.arange(call.rows)
        inside = row < call.num_queries if masked and call.num_queries % call.rows != 0 else None
        tile_rows = pl.ds(tile * call.rows, call.rows)
        query = load_rows(query_ref, (tile_rows, head, slice(None)), call, inside)
        lse = _statistics(_load_numbers(lse_ref, (head, tile_rows), inside), inside)
        scores = capped(call, call.dot(key, query, transpose_b=True))
        weights = call.exp2(call.multiply_add(scores, call.exponent_scale, -lse[None, :]))
        if masked:
            row_segments = None
            if segments is not None:
                row_segments = load_segments(refs, row, call.num_queries)[None, :]
            positions = query_positions(call, refs, row)
            mask = pair_mask(call, positions[None, :], index[:, None], row_segments, segments, limit)
            weights = jnp.where(mask, weights, 0.0)
        of_queries, of_keys = query_bits(call, refs, head, row), key_bits(call, refs, head, index)
        if of_queries is not None and of_keys is not None:
            of_queries, of_keys = of_queries[None, :], of_keys[:, None]
        dout = load_rows(dout_ref, (tile_rows, head, slice(None)), call, inside)
        delta = _load_numbers(delta_ref, (head, tile_rows), inside)
        dvalue += call.dot(dropped(call, weights, of_queries, of_keys).astype(dout.dtype), dout)
        dweights = dropped(call, call.dot(value, dout, transpose_b=True), of_queries, of_keys)
        dscores = weights * (dweights - delta[None, :]) * cap_slope(call, scores)
        dkey += call.dot(dscores.astype(query.dtype), query)
        return dkey, dvalue

    def over_heads(count: jax.Array, tile_of, masked: bool, carry):
        """`count` tiles of each head of the group, one head after the other."""

        def body(i, carry):
            head = jax.lax.div(i, jnp.maximum(count, 1))
            return step(head, tile_of(i - head * count), carry, masked=masked)

        return jax.lax.fori_loop(0, count * call.group, body, carry)

    zeros = jnp.zeros((call.keys, call.padded_head), jnp.float32)
    carry = over_heads(visit.num_full, lambda i: visit.full_first + i, False, (zeros, zeros))
    if needs_mask(call, refs) or call.num_queries % call.rows != 0:
        carry = over_heads(visit.num_masked, visit.masked, True, carry)
    dkey, dvalue = carry
    inside = None if call.num_keys % call.keys == 0 else index < call.num_keys
    store_rows(dkey_ref, dkey * call.options.scale, call, inside)
    store_rows(dvalue_ref, dvalue, call, inside)


def _queries_kernel(query_ref, key_ref, value_ref, dout_ref, lse_ref, delta_ref, refs, dquery_ref, *, call: Call):
    """Owns call.rows queries of one head, as the forward kernel."""
    first_row = (pl.num_programs(1) - 1 - pl.program_id(1)) * call.rows
    row = first_row + jnp.arange(call.rows)
    inside = None if call.num_queries % call.rows == 0 else row < call.num_queries
    positions = query_positions(call, refs, row)
    visit = keys_to_visit(call, refs, first_row, positions)
    limit = key_limit(call, refs)
    query = load_rows(query_ref, ..., call, inside)
    dout = load_rows(dout_ref, ..., call, inside)
    lse = _statistics(_load_numbers(lse_ref, ..., inside), inside)
    delta = _load_numbers(delta_ref, ..., inside)
    segments = load_segments(refs, row, call.num_queries)[:, None] if "segment_ids" in refs else None
    of_queries = query_bits(call, refs, 0, row)

    def step(tile: jax.Array, dquery, *, masked: bool):
        index = tile * call.keys + jnp.arange(call.keys)
        tile_rows = pl.ds(tile * call.keys, call.keys)
        inside = index < limit if masked else None
        key = load_rows(key_ref, (tile_rows, slice(None)), call, inside)
        value = load_rows(value_ref, (tile_rows, slice(None)), call, inside)
        scores = capped(call, call.dot(query, key, transpose_b=True))
        weights = call.exp2(call.multiply_add(scores, call.exponent_scale, -lse[:, None]))
        if masked:
            key_segments = None
            if segments is not None:
                key_segments = load_segments(refs, index, call.num_keys)[None, :]
            mask = pair_mask(call, positions[:, None], index[None, :], segments, key_segments, limit)
            weights = jnp.where(mask, weights, 0.0)
        dweights = call.dot(dout, value, transpose_b=True)
        if of_queries is not None:
            of_keys = key_bits(call, refs, 0, index)
            dweights = dropped(call, dweights, of_queries[:, None], of_keys[None, :])
        dscores = weights * (dweights - delta[:, None]) * cap_slope(call, scores)
        return dquery + call.dot(dscores.astype(key.dtype), key)

    dquery = jnp.zeros((call.rows, call.padded_head), jnp.float32)
    dquery = jax.lax.fori_loop(visit.full_first, visit.full_end, partial(step, masked=False), dquery)
    if needs_mask(call, refs):
        masked = partial(step, masked=True)
        dquery = jax.lax.fori_loop(0, visit.num_masked, lambda i, carry: masked(visit.masked(i), carry), dquery)
    store_rows(dquery_ref, dquery * call.options.scale, call, inside)


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


def dkey_dvalue_pallas(
    query, key, value, dout, lse, delta, arrays, options: Options, tiles: Tiles, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(dkey, dvalue), see `backward_pallas`."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    group = num_heads // num_kv_heads
    exact = query.dtype == jnp.float32
    call = Call(options, num_queries, num_keys, head_dim, group, tiles.rows, tiles.keys, exact, interpret)
    section = head_sections(
        batch * num_kv_heads, 1, 2 * num_queries * group * head_dim * query.dtype.itemsize, tiles.shared_mib
    )

    def row_and_head(member, tile, section_index):
        del tile
        head = section_index * section + member
        return head // num_kv_heads, head % num_kv_heads

    def key_block(member, tile, section_index):
        row, head = row_and_head(member, tile, section_index)
        return row, tile, head, 0

    def query_block(*ids):
        row, head = row_and_head(*ids)
        return row, 0, head, 0

    of_queries = pl.BlockSpec((None, call.padded_queries, group, call.padded_head), query_block)
    of_keys = pl.BlockSpec((None, call.keys, None, call.padded_head), key_block)
    of_numbers = pl.BlockSpec((None, group, call.padded_queries), lambda *ids: (*row_and_head(*ids), 0))
    return pl.pallas_call(
        partial(_keys_kernel, call=call),
        out_shape=(jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)),
        # Without a window the first keys are seen by the most queries, and start first.
        grid=(section, call.padded_keys // call.keys, batch * num_kv_heads // section),
        in_specs=[
            of_queries,
            of_keys,
            of_keys,
            of_queries,
            of_numbers,
            of_numbers,
            mask_specs(arrays, row_and_head, group),
        ],
        out_specs=(of_keys, of_keys),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_dkey_dvalue",
    )(query, key, value, dout, lse, delta, arrays)


def dquery_pallas(
    query, key, value, dout, lse, delta, arrays, options: Options, tiles: Tiles, *, interpret: bool = False
) -> jax.Array:
    """dquery, see `backward_pallas`."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    group = num_heads // num_kv_heads
    exact = query.dtype == jnp.float32
    call = Call(options, num_queries, num_keys, head_dim, group, tiles.rows, tiles.keys, exact, interpret)
    section = head_sections(batch * num_heads, group, 2 * num_keys * head_dim * key.dtype.itemsize, tiles.shared_mib)

    def row_and_head(member, tile, section_index):
        del tile
        head = section_index * section + member
        return head // num_heads, head % num_heads

    def query_block(member, tile, section_index):
        row, head = row_and_head(member, tile, section_index)
        return row, call.padded_queries // call.rows - 1 - tile, head, 0

    def key_block(*ids):
        row, head = row_and_head(*ids)
        return row, 0, head // group, 0

    def number_block(*ids):
        row, tile, head, _ = query_block(*ids)
        return row, head, tile

    of_queries = pl.BlockSpec((None, call.rows, None, call.padded_head), query_block)
    of_keys = pl.BlockSpec((None, call.padded_keys, None, call.padded_head), key_block)
    of_numbers = pl.BlockSpec((None, None, call.rows), number_block)
    return pl.pallas_call(
        partial(_queries_kernel, call=call),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(section, call.padded_queries // call.rows, batch * num_heads // section),
        in_specs=[
            of_queries,
            of_keys,
            of_keys,
            of_queries,
            of_numbers,
            of_numbers,
            mask_specs(arrays, row_and_head),
        ],
        out_specs=of_queries,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_dquery",
    )(query, key, value, dout, lse, delta, arrays)

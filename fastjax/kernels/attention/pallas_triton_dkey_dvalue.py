"""The pass of the backward over keys: dk and dv, summed over queries and over the heads of a group.

The equations stand in `pallas_triton_backward`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.attention.blocks import Tiles
from fastjax.kernels.attention.options import Options
from fastjax.kernels.attention.pallas_triton_masks import (
    dropped,
    key_bits,
    key_limit,
    load_segments,
    mask_specs,
    needs_mask,
    pair_mask,
    query_bits,
    query_positions,
)
from fastjax.kernels.attention.pallas_triton_parts import (
    Call,
    cap_slope,
    capped,
    head_sections,
    load_numbers,
    load_rows,
    statistics,
    store_rows,
)
from fastjax.kernels.attention.pallas_triton_visits import queries_to_visit


def _kernel(query_ref, key_ref, value_ref, dout_ref, lse_ref, delta_ref, refs, dkey_ref, dvalue_ref, *, call: Call):
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
        lse = statistics(load_numbers(lse_ref, (head, tile_rows), inside), inside)
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
        delta = load_numbers(delta_ref, (head, tile_rows), inside)
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


def dkey_dvalue_pallas(
    query, key, value, dout, lse, delta, arrays, options: Options, tiles: Tiles, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(dkey, dvalue), see `backward_pallas`."""
    batch, num_kv_heads = key.shape[0], key.shape[2]
    call = Call.of(query, key, options, tiles, interpret)
    num_bytes = 2 * call.num_queries * call.group * call.head_dim * query.dtype.itemsize
    section = head_sections(batch * num_kv_heads, 1, num_bytes, tiles.shared_mib)

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

    of_queries = pl.BlockSpec((None, call.padded_queries, call.group, call.padded_head), query_block)
    of_keys = pl.BlockSpec((None, call.keys, None, call.padded_head), key_block)
    of_numbers = pl.BlockSpec((None, call.group, call.padded_queries), lambda *ids: (*row_and_head(*ids), 0))
    return pl.pallas_call(
        partial(_kernel, call=call),
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
            mask_specs(arrays, row_and_head, call.group),
        ],
        out_specs=(of_keys, of_keys),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_dkey_dvalue",
    )(query, key, value, dout, lse, delta, arrays)

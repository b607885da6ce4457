"""The pass of the backward over queries: dq, summed over keys.

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
from fastjax.kernels.attention.pallas_triton_visits import (
    keys_to_visit,
)


def _kernel(query_ref, key_ref, value_ref, dout_ref, lse_ref, delta_ref, refs, dquery_ref, *, call: Call):
    """Owns call.rows queries of one head, as the forward kernel."""
    first_row = (pl.num_programs(1) - 1 - pl.program_id(1)) * call.rows
    row = first_row + jnp.arange(call.rows)
    inside = None if call.num_queries % call.rows == 0 else row < call.num_queries
    positions = query_positions(call, refs, row)
    visit = keys_to_visit(call, refs, first_row, positions)
    limit = key_limit(call, refs)
    query = load_rows(query_ref, ..., call, inside)
    dout = load_rows(dout_ref, ..., call, inside)
    lse = statistics(load_numbers(lse_ref, ..., inside), inside)
    delta = load_numbers(delta_ref, ..., inside)
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
        of_keys = key_bits(call, refs, 0, index)
        if of_queries is not None and of_keys is not None:
            dweights = dropped(call, dweights, of_queries[:, None], of_keys[None, :])
        dscores = weights * (dweights - delta[:, None]) * cap_slope(call, scores)
        return dquery + call.dot(dscores.astype(key.dtype), key)

    dquery = jnp.zeros((call.rows, call.padded_head), jnp.float32)
    dquery = jax.lax.fori_loop(visit.full_first, visit.full_end, partial(step, masked=False), dquery)
    if needs_mask(call, refs):
        masked = partial(step, masked=True)
        dquery = jax.lax.fori_loop(0, visit.num_masked, lambda i, carry: masked(visit.masked(i), carry), dquery)
    store_rows(dquery_ref, dquery * call.options.scale, call, inside)


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
        partial(_kernel, call=call),
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

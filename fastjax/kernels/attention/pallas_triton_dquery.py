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
    load_segments,
    mask_specs,
    needs_mask,
    pair_mask,
    query_bits,
)
from fastjax.kernels.attention.pallas_triton_parts import (
    Call,
    cap_slope,
    capped,
    load_numbers,
    load_rows,
    statistics,
    store_rows,
)
from fastjax.kernels.attention.pallas_triton_queries import QueryGrid, owned_queries


def _kernel(query_ref, key_ref, value_ref, dout_ref, lse_ref, delta_ref, refs, dquery_ref, *, call: Call):
    """Owns call.rows queries of one head, as the forward kernel."""
    own = owned_queries(call, refs)
    row, inside, positions, visit, limit = own.row, own.inside, own.positions, own.visit, own.limit
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
    call = Call.of(query, key, options, tiles, interpret)
    grid = QueryGrid.over(call, query, tiles)

    def key_block(*ids):
        row, head = grid.row_and_kv_head(*ids)
        return row, 0, head, 0

    of_keys = pl.BlockSpec((None, call.padded_keys, None, call.padded_head), key_block)
    return pl.pallas_call(
        partial(_kernel, call=call),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=grid.sizes,
        in_specs=[
            grid.queries(),
            of_keys,
            of_keys,
            grid.queries(),
            grid.numbers(),
            grid.numbers(),
            mask_specs(arrays, grid.row_and_head),
        ],
        out_specs=grid.queries(),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_dquery",
    )(query, key, value, dout, lse, delta, arrays)

"""The forward kernel: online softmax over tiles of keys.

With c = scale log2(e), over tiles j of keys, from m = -inf, l = 0, acc = 0:

    s    = q . k_j^T
    m'   = max(m, c max_j s)
    p    = 2^(c s - m')
    acc <- acc 2^(m - m') + p . v_j          l <- l 2^(m - m') + sum_j p         m <- m'
    out  = acc / l                           lse = (m + log2 l) / log2(e)

m, l and acc are float32; p is rounded to the dtype of v for its product. l is kept in parts, one for each column of a
tile modulo 8, which is what one thread holds of a row; they are added up at the end.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.attention.blocks import Tiles
from fastjax.kernels.attention.options import LOG2_E, Options
from fastjax.kernels.attention.pallas_triton_masks import (
    dropped,
    key_bits,
    layer_index,
    load_segments,
    mask_specs,
    needs_mask,
    pair_mask,
    query_bits,
)
from fastjax.kernels.attention.pallas_triton_parts import (
    Call,
    capped,
    load_rows,
    store_rows,
)
from fastjax.kernels.attention.pallas_triton_queries import QueryGrid, owned_queries

# Columns that a thread's share of a product repeats by.
_PARTS = 8


def _forward_kernel(query_ref, key_ref, value_ref, refs, out_ref, lse_ref, *, call: Call, registers: bool):
    """Owns call.rows queries of one head; query_ref [rows, H], key_ref and value_ref [L, S, H].

    Full tiles first, then those with a mask. A row without keys keeps l = 0 and gives zeros.
    """
    own = owned_queries(call, refs)
    row, inside, positions, visit, limit = own.row, own.inside, own.positions, own.visit, own.limit
    layer = layer_index(refs)
    query = load_rows(query_ref, ..., call, inside)
    if registers:
        # What comes out of a product lies in registers as the next one takes it, and q . 1 is q: the tensor cores then
        # read it there, and not from shared memory in every tile.
        query = call.dot(query, jnp.eye(call.padded_head, dtype=query.dtype)).astype(query.dtype)
    segments = load_segments(refs, row, call.num_queries)[:, None] if "segment_ids" in refs else None
    of_queries = query_bits(call, refs, 0, row)

    def step(tile: jax.Array, carry, *, masked: bool):
        acc, maximum, total = carry
        index = tile * call.keys + jnp.arange(call.keys)
        tile_rows = (layer, pl.ds(tile * call.keys, call.keys), slice(None))
        key = load_rows(key_ref, tile_rows, call, index < limit if masked else None)
        scores = capped(call, call.dot(query, key, transpose_b=True))
        if masked:
            key_segments = None
            if segments is not None:
                key_segments = load_segments(refs, index, call.num_keys)[None, :]
            mask = pair_mask(call, positions[:, None], index[None, :], segments, key_segments, limit)
            scores = jnp.where(mask, scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1) * call.exponent_scale)
        # -inf - -inf is NaN: a row that has seen no key yet counts from 0.
        finite = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum) if masked else new_maximum
        weights = call.exp2(call.multiply_add(scores, call.exponent_scale, -finite[:, None]))
        correction = call.exp2(maximum - finite)
        parts = jnp.sum(weights.reshape(call.rows, call.keys // _PARTS, _PARTS), axis=1)
        total = total * correction[:, None] + parts
        of_keys = key_bits(call, refs, 0, index)
        if of_queries is not None and of_keys is not None:
            weights = dropped(call, weights, of_queries[:, None], of_keys[None, :])
        value = load_rows(value_ref, tile_rows, call, index < limit if masked else None)
        acc = acc * correction[:, None] + call.dot(weights.astype(value.dtype), value)
        return acc, new_maximum, total

    carry = (
        jnp.zeros((call.rows, call.padded_head), jnp.float32),
        jnp.full((call.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((call.rows, _PARTS), jnp.float32),
    )
    carry = jax.lax.fori_loop(visit.full_first, visit.full_end, partial(step, masked=False), carry)
    if needs_mask(call, refs):
        masked = partial(step, masked=True)
        carry = jax.lax.fori_loop(0, visit.num_masked, lambda i, carry: masked(visit.masked(i), carry), carry)
    acc, maximum, total = carry
    total = jnp.sum(total, axis=1)
    is_empty = total == 0.0
    total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, maximum * (1 / LOG2_E) + jnp.log(total))
    plgpu.store(lse_ref, lse, mask=inside)
    store_rows(out_ref, acc / total[:, None], call, inside)


def layered_key_spec(key: jax.Array, call: Call, row_and_head: Any) -> pl.BlockSpec:
    """Block [L, padded S, padded H] of a [L, B, S, K, H] array; row_and_head(*program) -> (row, key/value head)."""

    def block(*ids):
        row, head = row_and_head(*ids)
        return 0, row, 0, head, 0

    return pl.BlockSpec((key.shape[0], None, call.padded_keys, None, call.padded_head), block)


def forward_pallas(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: dict[str, jax.Array],
    options: Options,
    tiles: Tiles,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, H] in query's dtype, lse [B, N, T] float32).

    Args:
      key, value: [L, B, S, K, H], of which arrays["layer"] (or the first) is read where it lies.
      arrays: as from `mask_arrays`.
    """
    batch, num_queries, num_heads, _ = query.shape
    call = Call.of(query, key, options, tiles, interpret)
    grid = QueryGrid.over(call, query, tiles)
    of_keys = layered_key_spec(key, call, grid.row_and_kv_head)
    out, lse = pl.pallas_call(
        partial(_forward_kernel, call=call, registers=tiles.query_in_registers and not call.exact),
        out_shape=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, num_heads, num_queries), jnp.float32),
        ),
        grid=grid.sizes,
        in_specs=[grid.queries(), of_keys, of_keys, mask_specs(arrays, grid.row_and_head)],
        out_specs=(grid.queries(), grid.numbers()),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_forward",
    )(query, key, value, arrays)
    return out, lse

"""Few queries against many keys: the keys are split among programs, and a second kernel joins their parts.

A program takes all queries that share a key/value head, T times the heads of the group, so that keys and values are
read once. Its part of the softmax is m = max s, l = sum 2^(s - m) and acc = sum 2^(s - m) v over its own keys, s in
base 2; then out = sum_parts 2^(m - M) acc / sum_parts 2^(m - M) l with M the largest m. Parts are added in order.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.attention.blocks import DecodeTiles
from fastjax.kernels.attention.options import LOG2_E, Options
from fastjax.kernels.attention.pallas_triton_forward import layered_key_spec
from fastjax.kernels.attention.pallas_triton_masks import (
    key_limit,
    layer_index,
    mask_specs,
    pair_mask,
    query_positions,
)
from fastjax.kernels.attention.pallas_triton_parts import (
    Call,
    capped,
    load_rows,
)
from fastjax.kernels.attention.pallas_triton_visits import (
    keys_to_visit,
)


def _part_kernel(query_ref, key_ref, value_ref, refs, acc_ref, max_ref, sum_ref, *, call: Call, split_tiles: int):
    """Owns split_tiles tiles of keys of one key/value head, for all queries that see it.

    query_ref [T, group, H]; key_ref, value_ref [L, S, H]; acc_ref [rows, H], max_ref and sum_ref [rows].
    """
    row = jnp.arange(call.rows)
    token, member = row // call.group, row % call.group
    positions = query_positions(call, refs, token)
    visit = keys_to_visit(call, refs, jnp.int32(0), positions)
    limit = key_limit(call, refs)
    layer = layer_index(refs)
    head_index = jnp.arange(call.padded_head)
    inside = (token < call.num_queries)[:, None] & (head_index < call.head_dim)[None, :]
    place = (jnp.minimum(token, call.num_queries - 1)[:, None], member[:, None], head_index[None, :])
    query = plgpu.load(query_ref.at[place], mask=inside, other=0.0)

    def step(tile: jax.Array, carry, *, masked: bool):
        acc, maximum, total = carry
        index = tile * call.keys + jnp.arange(call.keys)
        present = index < limit if masked else None
        tile_rows = (layer, pl.ds(tile * call.keys, call.keys), slice(None))
        key = load_rows(key_ref, tile_rows, call, present)
        scores = capped(call, call.dot(query, key, transpose_b=True))
        if masked:
            mask = pair_mask(call, positions[:, None], index[None, :], None, None, limit)
            scores = jnp.where(mask, scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1) * call.exponent_scale)
        finite = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
        weights = call.exp2(call.multiply_add(scores, call.exponent_scale, -finite[:, None]))
        correction = call.exp2(maximum - finite)
        value = load_rows(value_ref, tile_rows, call, present)
        acc = acc * correction[:, None] + call.dot(weights.astype(value.dtype), value)
        return acc, new_maximum, total * correction + jnp.sum(weights, axis=1)

    first = pl.program_id(1) * split_tiles
    end = first + split_tiles
    full_first, full_end = jnp.clip(visit.full_first, first, end), jnp.clip(visit.full_end, first, end)
    carry = (
        jnp.zeros((call.rows, call.padded_head), jnp.float32),
        jnp.full((call.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((call.rows,), jnp.float32),
    )
    carry = jax.lax.fori_loop(full_first, full_end, partial(step, masked=False), carry)
    # The masked tiles of this part: those of the whole row that lie in it, before and behind the full ones.
    before = (jnp.clip(visit.first, first, end), full_first)
    behind = (full_end, jnp.clip(visit.end, first, end))
    for masked_first, masked_end in (before, behind):
        carry = jax.lax.fori_loop(masked_first, masked_end, partial(step, masked=True), carry)
    acc, maximum, total = carry
    acc_ref[...] = acc
    max_ref[...] = maximum
    sum_ref[...] = total


def _join_kernel(acc_ref, max_ref, sum_ref, out_ref, lse_ref, *, num_parts: int, head_dim: int):
    """Owns one query of one head; acc_ref [parts, H], padded to powers of two."""
    part = jnp.arange(acc_ref.shape[0])
    inside = part < num_parts
    maximum = plgpu.load(max_ref, mask=inside, other=-jnp.inf)
    largest = jnp.max(maximum)
    factor = jnp.exp2(maximum - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = jnp.sum(factor * plgpu.load(sum_ref, mask=inside, other=0.0))
    acc = jnp.sum(factor[:, None] * plgpu.load(acc_ref, mask=inside[:, None], other=0.0), axis=0)
    divisor = jnp.where(total == 0.0, 1.0, total)
    in_head = jnp.arange(acc_ref.shape[1]) < head_dim
    plgpu.store(out_ref, (acc / divisor).astype(out_ref.dtype), mask=in_head)
    lse_ref[...] = jnp.where(total == 0.0, -jnp.inf, largest * (1 / LOG2_E) + jnp.log(divisor))


def decode_pallas(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    arrays: dict[str, jax.Array],
    options: Options,
    tiles: DecodeTiles,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `forward_pallas`, for a small T; `arrays` without segments and seeds."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[-3:-1]
    group = num_heads // num_kv_heads
    rows = max(16, pl.next_power_of_2(num_queries * group))
    exact = query.dtype == jnp.float32
    call = Call(options, num_queries, num_keys, head_dim, group, rows, tiles.keys, exact, interpret)
    num_parts = pl.cdiv(num_keys, tiles.split)
    of_keys = layered_key_spec(key, call, lambda head, part, row: (row, head))
    of_numbers = pl.BlockSpec((None, None, None, rows), lambda head, part, row: (row, head, part, 0))
    numbers = jax.ShapeDtypeStruct((batch, num_kv_heads, num_parts, rows), jnp.float32)
    acc, maximum, total = pl.pallas_call(
        partial(_part_kernel, call=call, split_tiles=tiles.split // tiles.keys),
        out_shape=(jax.ShapeDtypeStruct((*numbers.shape, call.padded_head), jnp.float32), numbers, numbers),
        grid=(num_kv_heads, num_parts, batch),
        in_specs=[
            pl.BlockSpec((None, num_queries, group, call.padded_head), lambda head, part, row: (row, 0, head, 0)),
            of_keys,
            of_keys,
            mask_specs(arrays, lambda head, part, row: (row, head)),
        ],
        out_specs=(
            pl.BlockSpec((None, None, None, rows, call.padded_head), lambda head, part, row: (row, head, part, 0, 0)),
            of_numbers,
            of_numbers,
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="attention_decode",
    )(query, key, value, arrays)
    padded_parts = pl.next_power_of_2(num_parts)

    def query_block(head, token, row):
        return row, token, head, 0

    def part_row(head, token, row):
        return row, head // group, 0, token * group + head % group

    return pl.pallas_call(
        partial(_join_kernel, num_parts=num_parts, head_dim=head_dim),
        out_shape=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, num_heads, num_queries), jnp.float32),
        ),
        grid=(num_heads, num_queries, batch),
        in_specs=[
            pl.BlockSpec((None, None, padded_parts, None, call.padded_head), lambda *ids: (*part_row(*ids), 0)),
            *[pl.BlockSpec((None, None, padded_parts, None), part_row)] * 2,
        ],
        out_specs=(
            pl.BlockSpec((None, None, None, call.padded_head), query_block),
            pl.BlockSpec((None, None, None), lambda head, token, row: (row, head, token)),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=1 if padded_parts < 32 else 4, num_stages=1),
        interpret=interpret,
        name="attention_decode_join",
    )(acc, maximum, total)

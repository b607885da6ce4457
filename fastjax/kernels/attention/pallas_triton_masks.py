"""The masks of the attention kernels within a tile, the arrays that they are made of, and dropout."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.attention.dropout import index_bits, keep
from fastjax.kernels.attention.pallas_triton_parts import Call

NO_SEGMENT = 0


def mask_arrays(
    positions=None, segment_ids=None, tile_bounds=None, kv_lengths=None, seeds=None, layer=None
) -> dict[str, jax.Array]:
    """Those that are given, by the names that kernels use."""
    arrays = {
        "positions": positions,
        "segment_ids": segment_ids,
        "bounds": tile_bounds,
        "kv_lengths": None if kv_lengths is None else kv_lengths[:, None],
        "seeds": seeds,
        "layer": None if layer is None else jnp.reshape(layer, 1),
    }
    return {name: array for name, array in arrays.items() if array is not None}


def mask_specs(arrays: dict[str, jax.Array], row_and_head: Any, heads: int = 1) -> dict[str, pl.BlockSpec]:
    """Whole rows of them; row_and_head(*program) -> (row, block of `heads` query heads)."""
    specs = {}
    for name, array in arrays.items():
        if name == "seeds":
            specs[name] = pl.BlockSpec((None, heads, 2), lambda *ids: (*row_and_head(*ids), 0))
        elif name == "layer":
            specs[name] = pl.BlockSpec((1,), lambda *ids: (0,))
        else:
            shape = (None, *array.shape[1:])
            specs[name] = pl.BlockSpec(shape, lambda *ids, n=array.ndim - 1: (row_and_head(*ids)[0], *(0,) * n))
    return specs


def query_positions(call: Call, refs: dict, row: jax.Array) -> jax.Array:
    """Index along the keys of these queries; rows past the end repeat the last one."""
    row = jnp.minimum(row, call.num_queries - 1)
    if "positions" in refs:
        return plgpu.load(refs["positions"].at[row])
    return row + (call.num_keys - call.num_queries)


def key_limit(call: Call, refs: dict) -> jax.Array | int:
    """Number of keys of this row."""
    if "kv_lengths" in refs:
        return jnp.minimum(refs["kv_lengths"][0], call.num_keys)
    return call.num_keys


def layer_index(refs: dict) -> jax.Array:
    return refs["layer"][0] if "layer" in refs else jnp.zeros((), jnp.int32)


def load_segments(refs: dict, index: jax.Array, length: int) -> jax.Array:
    return plgpu.load(refs["segment_ids"].at[index], mask=index < length, other=NO_SEGMENT)


def pair_mask(call: Call, positions: jax.Array, key_index: jax.Array, query_segments, key_segments, limit) -> jax.Array:
    """True where a query sees a key; every argument is broadcast to the tile's two dims."""
    options = call.options
    mask = key_index < limit
    if options.causal:
        mask &= key_index <= positions
    if options.window is not None:
        mask &= key_index > positions - options.window
        if not options.causal:
            mask &= key_index < positions + options.window
    if query_segments is not None:
        mask &= (query_segments == key_segments) & (query_segments != NO_SEGMENT)
    return mask


def needs_mask(call: Call, refs: dict) -> bool:
    """Whether any tile of keys can need one."""
    has_arrays = bool(refs.keys() & {"positions", "segment_ids", "kv_lengths"})
    return call.options.causal or call.options.window is not None or has_arrays or call.num_keys % call.keys != 0


def query_bits(call: Call, refs: dict, head, row: jax.Array) -> jax.Array | None:
    """Dropout bits of these queries; None without dropout."""
    return index_bits(refs["seeds"][head, 0], row) if "seeds" in refs else None


def key_bits(call: Call, refs: dict, head, index: jax.Array) -> jax.Array | None:
    return index_bits(refs["seeds"][head, 1], index) if "seeds" in refs else None


def dropped(call: Call, weights: jax.Array, queries: jax.Array | None, keys: jax.Array | None) -> jax.Array:
    """The weights that dropout keeps, scaled; bits are broadcast to the tile's two dims."""
    if queries is None or keys is None:
        return weights
    rate = call.options.dropout_rate
    return jnp.where(keep(queries, keys, rate), weights * (1.0 / (1.0 - rate)), 0.0)

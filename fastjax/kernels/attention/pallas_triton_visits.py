"""Which tiles a program visits: those that may hold a pair that is seen, and among them those that need no mask."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.attention.bounds import END, FIRST, RUN_END, RUN_FIRST
from fastjax.kernels.attention.pallas_triton_masks import key_limit
from fastjax.kernels.attention.pallas_triton_parts import Call


@dataclass(frozen=True)
class Visit:
    """Tiles [first, end) may hold a pair that is seen; in [full_first, full_end) every pair is."""

    first: jax.Array
    full_first: jax.Array
    full_end: jax.Array
    end: jax.Array

    @property
    def num_masked(self) -> jax.Array:
        return (self.full_first - self.first) + (self.end - self.full_end)

    @property
    def num_full(self) -> jax.Array:
        return self.full_end - self.full_first

    def masked(self, i: jax.Array) -> jax.Array:
        """The i-th tile that needs a mask."""
        tile = self.first + i
        return jnp.where(tile < self.full_first, tile, tile + self.num_full)


def _visit(first, full_first, full_end, end, tile: int) -> Visit:
    """From spans of elements, all of them clipped to what exists, to spans of tiles."""
    divide = jax.lax.div
    first, full_first, full_end, end = (jnp.maximum(jnp.int32(x), 0) for x in (first, full_first, full_end, end))
    tile_first, tile_end = divide(first, jnp.int32(tile)), divide(end + tile - 1, jnp.int32(tile))
    tile_end = jnp.maximum(tile_end, tile_first)
    full = jnp.clip(divide(full_first + tile - 1, jnp.int32(tile)), tile_first, tile_end)
    return Visit(tile_first, full, jnp.clip(divide(full_end, jnp.int32(tile)), full, tile_end), tile_end)


def keys_to_visit(call: Call, refs: dict, first_row: jax.Array, positions: jax.Array) -> Visit:
    """Tiles of keys that the queries first_row ... first_row + call.rows see."""
    options = call.options
    first: Any = 0
    full_first: Any = 0
    end: Any = key_limit(call, refs)
    full_end: Any = end
    lowest, highest = jnp.min(positions), jnp.max(positions)
    if options.causal:
        end, full_end = jnp.minimum(end, highest + 1), jnp.minimum(full_end, lowest + 1)
    if options.window is not None:
        first, full_first = jnp.maximum(first, lowest - options.window + 1), highest - options.window + 1
        if not options.causal:
            end, full_end = jnp.minimum(end, highest + options.window), jnp.minimum(full_end, lowest + options.window)
    if "bounds" in refs:
        span_first, span_end, run_first, run_end = _spans(refs, first_row, call.rows, call.num_queries)
        first, end = jnp.maximum(first, span_first), jnp.minimum(end, span_end)
        full_first, full_end = jnp.maximum(full_first, run_first), jnp.minimum(full_end, run_end)
    return _visit(first, full_first, full_end, end, call.keys)


def queries_to_visit(call: Call, refs: dict, first_key: jax.Array) -> Visit:
    """Tiles of queries that see the keys first_key ... first_key + call.keys."""
    options = call.options
    last_key = jnp.minimum(first_key + call.keys, call.num_keys) - 1
    first: Any = 0
    full_first: Any = 0
    end: Any = call.num_queries
    full_end: Any = call.num_queries
    if "positions" in refs:
        # Queries may stand anywhere along the keys.
        full_end = 0
    else:
        offset = call.num_keys - call.num_queries
        if options.causal:
            first, full_first = first_key - offset, last_key - offset
        if options.window is not None:
            end = jnp.minimum(end, last_key + options.window - offset)
            full_end = jnp.minimum(full_end, first_key + options.window - offset)
            if not options.causal:
                first, full_first = first_key - options.window + 1 - offset, last_key - options.window + 1 - offset
    if "bounds" in refs:
        span_first, span_end, run_first, run_end = _spans(refs, first_key, call.keys, call.num_keys)
        first, end = jnp.maximum(first, span_first), jnp.minimum(end, span_end)
        full_first, full_end = jnp.maximum(full_first, run_first), jnp.minimum(full_end, run_end)
    if "kv_lengths" in refs:
        limit = key_limit(call, refs)
        # Minima, since the compiler has no rule for a choice between two constants.
        end = jnp.minimum(end, jnp.clip(limit - first_key, 0, 1) * call.num_queries)
        full_end = jnp.minimum(full_end, jnp.clip(limit - last_key, 0, 1) * call.num_queries)
    return _visit(first, full_first, full_end, end, call.rows)


def _spans(refs: dict, first: jax.Array, size: int, length: int) -> tuple[jax.Array, ...]:
    index = jnp.minimum(first + jnp.arange(size), length - 1)
    span_first, span_end, run_first, run_end = (
        plgpu.load(refs["bounds"].at[row, index]) for row in (FIRST, END, RUN_FIRST, RUN_END)
    )
    return jnp.min(span_first), jnp.max(span_end), jnp.max(run_first), jnp.min(run_end)

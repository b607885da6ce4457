"""What the attention kernels share: arithmetic, which tiles to visit, masks, and the arrays that masks are made of."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.attention.bounds import END, FIRST, RUN_END, RUN_FIRST
from fastjax.kernels.attention.dropout import index_bits, keep
from fastjax.kernels.attention.options import Options

LOG2_E = math.log2(math.e)
NO_SEGMENT = 0


@dataclass(frozen=True)
class Call:
    """What every program of a kernel knows.

    Attributes:
      num_queries, num_keys, head_dim: T, S and H; tiles are padded beyond them.
      group: query heads a key/value head.
      rows, keys: queries and keys of one tile.
      exact: operands are float32 and products must not be rounded to TF32.
      interpret: inline assembly is replaced by what it computes.
    """

    options: Options
    num_queries: int
    num_keys: int
    head_dim: int
    group: int
    rows: int
    keys: int
    exact: bool
    interpret: bool

    @property
    def padded_head(self) -> int:
        return max(16, pl.next_power_of_2(self.head_dim))

    @property
    def padded_queries(self) -> int:
        return pl.cdiv(self.num_queries, self.rows) * self.rows

    @property
    def padded_keys(self) -> int:
        return pl.cdiv(self.num_keys, self.keys) * self.keys

    @property
    def exponent_scale(self) -> float:
        """Factor of a raw product in the exponent of 2; with a soft cap the scores are scaled beforehand."""
        return LOG2_E if self.options.softcap is not None else self.options.scale * LOG2_E

    def dot(self, a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
        """a . b, or a . b^T, summed in float32."""
        dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
        precision: Any = None
        if self.exact:
            # Three TF32 products are as good as float32 ones here, and run on the tensor cores.
            highest = jax.lax.Precision.HIGHEST
            precision = highest if self.interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    def exp2(self, x: jax.Array) -> jax.Array:
        """2^x; results below the smallest normal number become 0."""
        if self.interpret:
            return jnp.exp2(x)
        return _assembly("ex2.approx.ftz.f32 $0, $1;", "=f,f", x)

    def multiply_add(self, a: jax.Array, b: float | jax.Array, c: jax.Array) -> jax.Array:
        """a b + c in one instruction: the compiler here does not contract the two by itself."""
        shape = jnp.broadcast_shapes(a.shape, c.shape)
        b = jnp.asarray(b, jnp.float32)
        a, b, c = (jnp.broadcast_to(x, shape) for x in (a, b, c))
        return a * b + c if self.interpret else _assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c)


def _assembly(code: str, constraints: str, *args: jax.Array) -> jax.Array:
    shape = [jax.ShapeDtypeStruct(args[0].shape, jnp.float32)]
    return plgpu.elementwise_inline_asm(code, args=args, constraints=constraints, pack=1, result_shape_dtypes=shape)[0]


def capped(call: Call, product: jax.Array) -> jax.Array:
    """The score before its exponent: the raw product, or with a soft cap the scaled and capped one."""
    cap = call.options.softcap
    return product if cap is None else cap * jnp.tanh(product * (call.options.scale / cap))


def cap_slope(call: Call, score: jax.Array) -> jax.Array | float:
    """d capped / d (scale product)."""
    cap = call.options.softcap
    return 1.0 if cap is None else 1.0 - (score / cap) * (score / cap)


def head_sections(num_heads: int, group: int, bytes_per_group: int, shared_mib: int) -> int:
    """How many heads, over all rows of the batch, run side by side: so few that what they share stays cached.

    A divisor of num_heads and a multiple of `group`, whose heads share `bytes_per_group`.
    """
    num_groups = num_heads // group
    wanted = max(1, shared_mib * 2**20 // max(bytes_per_group, 1))
    return group * max(d for d in range(1, num_groups + 1) if num_groups % d == 0 and d <= wanted)


# --- the arrays that masks are made of ---


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


# --- which tiles to visit ---


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


# --- masks within a tile ---


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


def load_rows(ref, index: Any, call: Call, inside: jax.Array | None) -> jax.Array:
    """[tile, padded_head] of a [rows, padded_head] block; what lies outside of `inside` or of the head is 0."""
    mask = None
    if call.padded_head != call.head_dim:
        mask = (jnp.arange(call.padded_head) < call.head_dim)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else inside[:, None] & mask
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=0.0)


def store_rows(ref, values: jax.Array, call: Call, inside: jax.Array | None) -> None:
    mask = None
    if call.padded_head != call.head_dim:
        mask = (jnp.arange(call.padded_head) < call.head_dim)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else inside[:, None] & mask
    plgpu.store(ref, values.astype(ref.dtype), mask=mask)

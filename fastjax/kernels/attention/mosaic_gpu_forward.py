"""The forward kernel for Hopper, on Pallas' Mosaic GPU backend; the equation is `pallas_triton_forward`'s.

A block is three groups of four warps. One group does nothing but copy tiles of keys and values into a ring of slots in
shared memory. Each of the other two owns `rows` queries and takes turns with its twin, by one barrier: while the
products of one occupy the tensor cores, the other computes its softmax. Full tiles first, then those on the diagonal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fastjax.kernels.attention.blocks import MosaicTiles
from fastjax.kernels.attention.options import LOG2_E, Options

_COMPUTE_GROUPS = 2
# Of 65536 registers a multiprocessor: 2 x 128 x 232 + 128 x 40.
_COMPUTE_REGISTERS = 232
_COPY_REGISTERS = 40


@dataclass(frozen=True)
class _Call:
    """What every program knows: tiles of `tiles.rows` queries a group, by `tiles.keys` keys; `group` as in `Call`."""

    options: Options
    num_queries: int
    num_keys: int
    head_dim: int
    group: int
    tiles: MosaicTiles

    @property
    def block_rows(self) -> int:
        return _COMPUTE_GROUPS * self.tiles.rows

    def steps(self, first_row: jax.Array, rows: int) -> tuple[Any, Any]:
        """How many tiles of keys the queries from first_row on see in full, and how many at all."""
        keys = jnp.int32(self.tiles.keys)
        if self.options.causal:
            return jax.lax.div(first_row, keys), jax.lax.div(first_row + (rows + self.tiles.keys - 1), keys)
        return jnp.int32(self.num_keys // self.tiles.keys), jnp.int32(pl.cdiv(self.num_keys, self.tiles.keys))


@dataclass(frozen=True)
class _Shared:
    """Shared memory and the barriers over it: one of a compute group, one a slot, or one."""

    query: Any
    key: Any
    value: Any
    lse: Any
    query_ready: Any
    key_ready: Any
    value_ready: Any
    key_read: Any
    value_read: Any
    turn: Any


def _kernel(query_ref, key_ref, value_ref, out_ref, lse_ref, shared: _Shared, *, call: _Call):
    """Owns block_rows queries of one head; the refs are whole arrays in device memory."""
    row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
    # Long rows of tiles start first, so that short ones fill the gaps at the end.
    num_blocks = pl.cdiv(call.num_queries, call.block_rows)
    first_row = (num_blocks - 1 - jax.lax.axis_index("tile")) * call.block_rows
    _, num_steps = call.steps(first_row, call.block_rows)
    group = jax.lax.axis_index("group")

    @pl.when(group < _COMPUTE_GROUPS)
    def _compute():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        own_row = first_row + group * call.tiles.rows
        rows = pl.ds(own_row, call.tiles.rows)
        query = shared.query.at[group]
        plgpu.copy_gmem_to_smem(query_ref.at[row, rows, head], query, shared.query_ready.at[group])
        plgpu.barrier_wait(shared.query_ready.at[group])
        acc, maximum, total = _over_keys(query, own_row, num_steps, group, shared, call)
        query[...] = (acc / jax.lax.broadcast_in_dim(total, acc.shape, [0])).astype(query.dtype)
        shared.lse.at[group][...] = maximum * (1 / LOG2_E) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(query, out_ref.at[row, rows, head])
        plgpu.copy_smem_to_gmem(shared.lse.at[group], lse_ref.at[row, head, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == _COMPUTE_GROUPS)
    def _copy():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        kv_head = jax.lax.div(head, jnp.array(call.group, jnp.int32))

        def copy(ref, slots, ready, step, slot):
            tile = ref.at[row, pl.ds(step * call.tiles.keys, call.tiles.keys), kv_head]
            plgpu.copy_gmem_to_smem(tile, slots.at[slot], ready.at[slot])

        @pl.loop(0, num_steps)
        def _(step):
            slot = jax.lax.rem(step, jnp.array(call.tiles.slots, jnp.int32))
            is_taken = step >= call.tiles.slots
            pl.when(is_taken)(partial(plgpu.barrier_wait, shared.key_read.at[slot]))
            copy(key_ref, shared.key, shared.key_ready, step, slot)
            pl.when(is_taken)(partial(plgpu.barrier_wait, shared.value_read.at[slot]))
            copy(value_ref, shared.value, shared.value_ready, step, slot)


def _over_keys(query, first_row, num_steps, group, shared: _Shared, call: _Call):
    """(acc, maximum, total) of the queries of one group; num_steps is how many tiles its twin may have to go."""
    rows, keys = call.tiles.rows, call.tiles.keys
    full_steps, own_steps = call.steps(first_row, rows)

    def take_turn():
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    def slot_of(step):
        return jax.lax.rem(step, jnp.array(call.tiles.slots, jnp.int32))

    def step(index, carry, *, masked: bool):
        acc, maximum, total = carry
        slot = slot_of(index)

        def products(scores):
            plgpu.wgmma(scores, query, shared.key.at[slot].transpose((1, 0)))
            take_turn()
            return scores[...]

        scores = pl.run_scoped(products, plgpu.ACC((rows, keys), jnp.float32))
        plgpu.barrier_arrive(shared.key_read.at[slot])
        if masked:
            iota = partial(plgpu.broadcasted_iota, jnp.int32, (rows, keys), layout=plgpu.Layout.WGMMA)
            key_index = iota(1) + index * keys
            seen = key_index <= iota(0) + first_row if call.options.causal else key_index < call.num_keys
            scores = jnp.where(seen, scores, -jnp.inf)
        scale = call.options.scale * LOG2_E
        new_maximum = jnp.maximum(maximum, scores.max(axis=1) * scale)
        correction = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores * scale - jax.lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
        acc *= jax.lax.broadcast_in_dim(correction, acc.shape, [0])
        total *= correction
        rounded = weights.astype(query.dtype)

        def hand_over():
            plgpu.barrier_arrive(shared.turn)
            plgpu.barrier_wait(shared.value_ready.at[slot])
            plgpu.barrier_wait(shared.turn)

        total += weights.sum(axis=1)
        acc, total, new_maximum, rounded = jax.lax.optimization_barrier((acc, total, new_maximum, rounded))
        hand_over()

        is_last, next_ready = index + 1 >= own_steps, shared.key_ready.at[slot_of(index + 1)]

        def accumulate(acc_ref):
            plgpu.wgmma(acc_ref, rounded, shared.value.at[slot])
            pl.when(~is_last)(partial(plgpu.barrier_wait, next_ready))

        acc = pl.run_state(accumulate)(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(shared.value_read.at[slot])
        return acc, new_maximum, total

    by_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.zeros((rows, call.head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), by_row),
    )
    plgpu.barrier_wait(shared.key_ready.at[0])
    pl.when(group == 1)(take_turn)
    carry = jax.lax.fori_loop(0, full_steps, partial(step, masked=False), carry)
    if call.options.causal or call.num_keys % keys != 0:
        carry = jax.lax.fori_loop(full_steps, own_steps, partial(step, masked=True), carry)

    def skip(index, _):
        slot = slot_of(index)
        plgpu.barrier_arrive(shared.key_read.at[slot])
        plgpu.barrier_arrive(shared.value_read.at[slot])
        take_turn()
        take_turn()

    jax.lax.fori_loop(own_steps, num_steps, skip, None)
    pl.when(group == 0)(take_turn)
    return carry


def forward_mosaic(
    query: jax.Array, key: jax.Array, value: jax.Array, options: Options, tiles: MosaicTiles
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, H] in query's dtype, lse [B, N, T] float32)."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    call = _Call(options, num_queries, num_keys, head_dim, num_heads // num_kv_heads, tiles)
    num_blocks = pl.cdiv(num_queries, call.block_rows)

    def buffer(*shape: int):
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((*shape, head_dim), query.dtype, transforms=transforms)

    per_group = plgpu.Barrier(num_barriers=_COMPUTE_GROUPS)
    per_slot = plgpu.Barrier(num_barriers=tiles.slots)
    per_slot_read = plgpu.Barrier(num_arrivals=_COMPUTE_GROUPS, num_barriers=tiles.slots)
    scratch = (
        buffer(_COMPUTE_GROUPS, tiles.rows),
        buffer(tiles.slots, tiles.keys),
        buffer(tiles.slots, tiles.keys),
        plgpu.SMEM((_COMPUTE_GROUPS, tiles.rows), jnp.float32),
        per_group,
        per_slot,
        per_slot,
        per_slot_read,
        per_slot_read,
        plgpu.Barrier(num_arrivals=_COMPUTE_GROUPS),
    )

    def entry(query_ref, key_ref, value_ref, out_ref, lse_ref):
        def run(*buffers):
            _kernel(query_ref, key_ref, value_ref, out_ref, lse_ref, _Shared(*buffers), call=call)

        pl.run_scoped(run, *scratch, collective_axes="group")

    run: Callable = plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            # Whole blocks: the rows of an array that the copy engine writes lie 16 bytes apart, or a multiple.
            jax.ShapeDtypeStruct((batch, num_heads, num_blocks * call.block_rows), jnp.float32),
        ),
        grid=(batch, num_blocks, num_heads),
        grid_names=("row", "tile", "head"),
        num_threads=_COMPUTE_GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="attention_forward_mosaic",
    )
    out, lse = run(query, key, value)
    return out, lse[:, :, :num_queries]

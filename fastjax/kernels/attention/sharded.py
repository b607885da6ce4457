"""Attention under a mesh: every device computes the rows and heads that lie on it."""

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fastjax.kernels._dispatch import triton_reason
from fastjax.kernels.attention.api import attention
from fastjax.kernels.attention.dropout import dropout_seeds


def sharded_attention(
    mesh: Mesh,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    batch_axes: tuple[str, ...] = ("data", "fsdp"),
    head_axis: str | None = "tensor",
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    tile_bounds: jax.Array | None = None,
    dropout_rate: float = 0.0,
    rng: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    interpret: bool | None = None,
    **settings: Any,
) -> Any:
    """`attention` with rows split over the mesh's `batch_axes` and heads over its `head_axis`, without any exchange.

    The compiler cannot split a kernel by itself: it would gather the activations on every device. Dropout depends on
    global indices, so the mesh does not change what is dropped.

    Args:
      mesh: its named axes; an axis that it does not have counts as one device.
      query, key, value, segment_ids, positions, kv_lengths, tile_bounds: global arrays, as `attention` takes them.
      implementation: None takes the Pallas kernel where it can run, since cuDNN under a mesh is not measured.
      settings: further arguments of `attention`.
    Returns: as `attention`, laid out as query.
    Raises: ValueError if rows or heads cannot be split evenly; and what `attention` raises.
    """
    rows = tuple(axis for axis in batch_axes if axis in mesh.shape)
    heads = head_axis if head_axis in mesh.shape else None
    num_row_shards = 1
    for axis in rows:
        num_row_shards *= mesh.shape[axis]
    num_head_shards = 1 if heads is None else mesh.shape[heads]
    batch, num_heads, num_kv_heads = query.shape[0], query.shape[2], key.shape[2]
    if batch % num_row_shards != 0:
        raise ValueError(f"{batch} rows cannot be split over {num_row_shards} devices; use a multiple of them")
    if num_kv_heads % num_head_shards != 0:
        raise ValueError(
            f"{num_kv_heads} key/value heads cannot be split over {num_head_shards} devices; use a divisor of them"
        )
    if implementation is None and triton_reason(bool(interpret)) is None:
        implementation = "pallas_triton"
    seeds = dropout_seeds(rng, batch, num_heads) if dropout_rate > 0.0 and rng is not None else None
    settings |= {
        "dropout_rate": dropout_rate,
        "return_lse": return_lse,
        "implementation": implementation,
        "interpret": interpret,
    }

    def run(query: jax.Array, key: jax.Array, value: jax.Array, given: dict[str, Any]) -> Any:
        return attention(query, key, value, **given, **settings)

    arrays = {
        "segment_ids": (segment_ids, P(rows, None)),
        "positions": (positions, P(rows if positions is not None and positions.shape[0] == batch else None, None)),
        "kv_lengths": (kv_lengths, P(rows)),
        "tile_bounds": (tile_bounds, P(rows, None, None)),
        "rng": (seeds, P(rows, heads, None)),
    }
    given = {name: array for name, (array, _) in arrays.items() if array is not None}
    specs = {name: arrays[name][1] for name in given}
    of_heads, of_numbers = P(rows, None, heads, None), P(rows, heads, None)
    out_specs = (of_heads, of_numbers) if return_lse else of_heads
    # A pallas_call does not say how its outputs vary over the mesh, so that check is off.
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(of_heads, of_heads, of_heads, specs), out_specs=out_specs, check_vma=False
    )
    return mapped(query, key, value, given)

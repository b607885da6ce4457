"""What a loader fills: the stacked arrays of a model on their devices, a tensor at a time, each device its own part."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fastjax.kernels.nf4 import QuantizedWeight, quantize
from fastjax.kernels.nf4.reference import assemble
from fastjax.models.checkpoint.checkpoint import PackedFormat
from fastjax.models.host import place
from fastjax.models.quantized import MixedWeight
from fastjax.models.sharding import Layout, leaf_name


def empty(path: str, value: Any, layout: Layout | None, mesh: Mesh | None) -> Any:
    """Zeros for a variable's abstract value, split as the layout says; on jax's default device where there is none."""

    def one(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if layout is None or mesh is None:
            return jnp.zeros(leaf.shape, leaf.dtype)
        name = ".".join(part for part in (path, leaf_name(keys)) if part)
        sharding = NamedSharding(mesh, layout.spec(name, leaf.shape, trained=False))
        return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)

    return jax.tree_util.tree_map_with_path(one, value)


def filled(buffer: Any, tensor: np.ndarray | QuantizedWeight, layer: int | None, dtype: Any, packed: Any) -> Any:
    """The buffer, which is used up, with one tensor of the checkpoint in it.

    Args:
      layer: its row, or None for a buffer without layers.
      dtype: of a weight that stays float.
      packed: the PackedFormat of a 4-bit one, or None.
    """
    if isinstance(buffer, MixedWeight):
        assert layer is not None
        row, kind = buffer.row(layer), "quantized" if buffer.is_quantized[layer] else "dense"
        part = filled(getattr(buffer, kind), tensor, row, dtype, packed)
        return dataclasses.replace(buffer, **{kind: part})
    value = _on_devices(tensor, packed, dtype, _row_places(buffer, layer is not None))
    return _with_row(buffer, value, layer)


def _with_row(buffer: Any, value: Any, layer: int | None) -> Any:
    return jax.tree.map(lambda b, v: _put(b, v, layer, b.sharding), buffer, value)


def _row_places(buffer: Any, stacked: bool) -> Any:
    """Where one tensor of a buffer lies: as the buffer, less its first dimension; None on a single device."""
    if not isinstance(jax.tree.leaves(buffer)[0].sharding, NamedSharding):
        return None
    return jax.tree.map(
        lambda leaf: NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[int(stacked) :])), buffer
    )


def _on_devices(
    tensor: np.ndarray | QuantizedWeight, packed: PackedFormat | None, dtype: Any, places: Any
) -> jax.Array | QuantizedWeight:
    # np.array copies: what jax gets is memory of its own, not a map of the file.
    if isinstance(tensor, QuantizedWeight):
        return _put_whole(jax.tree.map(np.array, tensor), places)
    if packed is None:
        return _put_whole(np.array(tensor, dtype=dtype, order="C"), places)
    array = np.array(tensor, dtype=jnp.dtype(packed.dtype), order="C")
    if places is None:
        return quantize(jax.device_put(array), quant_type=packed.quant_type, nested=packed.nested)
    return _quantized_in_parts(
        place(array, places.codes), packed.quant_type, packed.nested, places.codes, places.absmax
    )


def _put_whole(value: Any, places: Any) -> Any:
    return jax.device_put(value) if places is None else place(value, places)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _quantized_in_parts(
    weight: jax.Array, quant_type: str, nested: bool, codes_place: NamedSharding, absmax_place: NamedSharding
) -> QuantizedWeight:
    """`quantize` of a weight of which each device has a part: the same bytes.

    Blocks of 64 never straddle parts. Their scales, a sixty-fourth of the weight, are coded from the whole of them.
    """

    def part(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        done = quantize(weight, quant_type=quant_type, nested=False)
        return done.codes, done.absmax

    mesh, spec = codes_place.mesh, codes_place.spec
    codes, absmax = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)(weight)
    whole = jax.lax.with_sharding_constraint(absmax.reshape(-1), NamedSharding(mesh, PartitionSpec()))
    shape = (weight.shape[0], weight.shape[1])
    made = assemble(codes, whole, shape, quant_type, nested, jnp.dtype(weight.dtype))
    constrain = jax.lax.with_sharding_constraint
    return dataclasses.replace(
        made, codes=constrain(made.codes, codes_place), absmax=constrain(made.absmax, absmax_place)
    )


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _put(buffer: jax.Array, value: jax.Array, layer: int | jax.Array | None, sharding: Any) -> jax.Array:
    if layer is None:
        out = jax.lax.dynamic_update_slice(buffer, value, (0,) * buffer.ndim)
    else:
        out = jax.lax.dynamic_update_index_in_dim(buffer, value, layer, 0)
    return jax.lax.with_sharding_constraint(out, sharding) if isinstance(sharding, NamedSharding) else out

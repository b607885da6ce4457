"""The device mesh of a run, and the arrays of a run on it."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fastjax.errors import UserError
from fastjax.hosts.exchange import num_processes, smallest
from fastjax.models.config import ModelConfig
from fastjax.models.host import place
from fastjax.models.sharding import AXES, BATCH_AXES, Layout, check_layout, fitting_meshes, mesh_name
from fastjax.train.compressed import CompressedState
from fastjax.train.config import RowConfig
from fastjax.train.loss import ROWS

__all__ = [
    "AXES", "BATCH_AXES", "batch_sharding", "batch_shardings", "check_compresses",
    "check_covers_processes", "config_mesh",
    "frozen_shardings", "local_rows", "make_mesh", "num_batch_shards", "put_batch", "replicated", "shares_threads",
    "state_shardings", "state_specs", "trained_shardings",
]  # fmt: skip


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of data x fsdp x tensor devices with the axes of those names, all of type Auto.

    Raises: UserError if there are fewer devices.
    """
    available = jax.devices()
    num = data * fsdp * tensor
    if num > len(available):
        raise UserError(f"{_too_many(data, fsdp, tensor)}; use data={len(available)} or fewer")
    shape_of = (data, fsdp, tensor)
    return jax.make_mesh(shape_of, AXES, axis_types=(AxisType.Auto,) * 3, devices=available[:num])


def config_mesh(config: RowConfig, model: ModelConfig, method: str, *, quantized: bool) -> Mesh:
    """The mesh that `config.mesh` names.

    `auto` takes every device: by fsdp where weights, gradients and states together are more than half of a device's
    memory, else by data.

    Args:
      model: shapes of the model.
      method: what is trained, of qlora, lora and full.
      quantized: whether its linear layers are 4-bit.
    Raises: UserError for more devices than there are, or a mesh that does not divide the model.
    """
    shape = config.mesh_shape
    if shape is None:
        num = len(jax.devices())
        # All processes must choose the same mesh.
        room = smallest((jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"))
        is_large = room is not None and _held_bytes(config, model, method, quantized) > room / 2
        shape = (1, num, 1) if is_large else (num, 1, 1)
    if math.prod(shape) > len(jax.devices()):
        fitting = fitting_meshes(model, len(jax.devices()), quantized=quantized)
        raise UserError(f"{_too_many(*shape)}; {fitting}")
    check_layout(model, *shape, quantized=quantized)
    return make_mesh(*shape)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """[A, B, T] arrays, rows split over the data-parallel devices."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def num_batch_shards(mesh: Mesh) -> int:
    """The number of data-parallel ranks."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def shares_threads(mesh: Mesh) -> bool:
    """Whether the mesh's devices are parts of one CPU.

    They share its threads then, and the collectives of two computations at once may wait for each other for ever.
    """
    return mesh.devices.flat[0].platform == "cpu" and len(mesh.local_devices) > 1


def put_batch(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """A host batch of [A, B, T] arrays on the devices; B must be a multiple of the data-parallel ranks."""
    return place(dict(batch), batch_shardings(batch, mesh))


def batch_shardings(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
    """Where each of a batch's arrays lies: rows of the embedding wait in host memory, the others on the devices."""
    split = batch_sharding(mesh)
    return {name: split.with_memory_kind("pinned_host") if name == ROWS else split for name in batch}


def check_covers_processes(mesh: Mesh) -> None:
    """Raises: UserError if the mesh leaves devices out of a run of several processes, all of which must take part."""
    if num_processes() > 1 and mesh.size != jax.device_count():
        raise UserError(
            f"mesh {','.join(f'{axis}={size}' for axis, size in mesh.shape.items())} has {mesh.size} devices, and the "
            f"{num_processes()} processes of this run have {jax.device_count()}; all of them must be in the mesh, such "
            f"as data={jax.device_count()}"
        )


def check_compresses(grad_compression: str, mesh: Mesh) -> None:
    """Raises: UserError if gradients are to be summed in few bits and the mesh has no axis on which they are."""
    if grad_compression != "none" and mesh.shape["data"] == 1:
        raise UserError(
            f"grad_compression={grad_compression} and a mesh with data=1: gradients are summed in few bits over the "
            "data axis alone; use data=N with N of 2 or more, or leave grad_compression out"
        )


def local_rows(mesh: Mesh, batch_size: int) -> list[range]:
    """The rows, of a micro-batch of so many, that devices of this process work on; runs that do not overlap."""
    index = batch_sharding(mesh).addressable_devices_indices_map((1, batch_size, 1)).values()
    found = {part[1].indices(batch_size)[:2] for part in index if part is not None}
    return [range(*rows) for rows in sorted(found)]


def trained_shardings(config: ModelConfig, mesh: Mesh, trainable: Any) -> Any:
    """Where each trained weight lies, as a tree like `trainable`, which may be abstract."""
    return _on(mesh, Layout.of(config, mesh).specs(trainable, trained=True))


def frozen_shardings(config: ModelConfig, mesh: Mesh, frozen: Any) -> Any:
    """Where each frozen weight lies, as a tree like `frozen`, which may be abstract."""
    return _on(mesh, Layout.of(config, mesh).specs(frozen, trained=False))


def state_shardings(config: ModelConfig, mesh: Mesh, opt_state: Any, trainable: Any) -> Any:
    """Where each of the optimiser's states lies: with its weight."""
    return _on(mesh, state_specs(Layout.of(config, mesh), opt_state, trainable))


def state_specs(layout: Layout, opt_state: Any, trainable: Any) -> Any:
    """How each of the optimiser's states is split: as its weight, and residuals by device."""
    if isinstance(opt_state, CompressedState):
        residuals = jax.tree.map(lambda _: PartitionSpec(AXES), opt_state.residuals)
        return CompressedState(layout.state_specs(opt_state.optimizer, trainable), residuals)
    return layout.state_specs(opt_state, trainable)


def _too_many(data: int, fsdp: int, tensor: int) -> str:
    have = jax.devices()
    name, num = mesh_name(data, fsdp, tensor), data * fsdp * tensor
    return f"mesh {name} needs {num} devices and there are {len(have)} ({have[0].platform})"


def _held_bytes(config: RowConfig, model: ModelConfig, method: str, quantized: bool) -> float:
    """About what a run holds on one device without a mesh: weights, and for method=full gradients and states."""
    heads = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    linears = model.num_hidden_layers * model.hidden_size * (heads + 3 * model.intermediate_size)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    itemsize = 16 if method == "full" else jnp.dtype(config.dtype).itemsize
    return linears * (0.52 if quantized else itemsize) + tables * itemsize


def _on(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

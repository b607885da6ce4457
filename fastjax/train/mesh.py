"""The device mesh, and where a step's arrays lie on it."""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fastjax.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


def make_mesh(data: int = 1) -> Mesh:
    """A mesh of `data` x 1 x 1 devices with the axes data, fsdp and tensor, all of type Auto.

    Raises: UserError if there are fewer devices.
    """
    available = jax.devices()
    if data > len(available):
        raise UserError(
            f"mesh data={data} needs {data} devices and there are {len(available)} "
            f"({available[0].platform}); use data={len(available)} or fewer"
        )
    return jax.make_mesh((data, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3, devices=available[:data])


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """[A, B, T] arrays, rows split over the data-parallel devices."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def num_batch_shards(mesh: Mesh) -> int:
    """The number of data-parallel ranks."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def put_batch(batch: dict[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """A host batch of [A, B, T] arrays on the devices; B must be a multiple of the data-parallel ranks."""
    return jax.device_put(batch, batch_sharding(mesh))

"""The device mesh, and where a step's arrays lie on it."""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fastjax.errors import UserError
from fastjax.hosts.exchange import num_processes
from fastjax.models.host import place

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
    return place(batch, batch_sharding(mesh))


def check_covers_processes(mesh: Mesh) -> None:
    """Raises: UserError if the mesh leaves devices out of a run of several processes, all of which must take part."""
    if num_processes() > 1 and mesh.size != jax.device_count():
        raise UserError(
            f"mesh {','.join(f'{axis}={size}' for axis, size in mesh.shape.items())} has {mesh.size} devices, and the "
            f"{num_processes()} processes of this run have {jax.device_count()}; all of them must be in the mesh, such "
            f"as data={jax.device_count()}"
        )


def local_rows(mesh: Mesh, batch_size: int) -> list[range]:
    """The rows, of a micro-batch of so many, that devices of this process work on; runs that do not overlap."""
    index = batch_sharding(mesh).addressable_devices_indices_map((1, batch_size, 1)).values()
    found = {part[1].indices(batch_size)[:2] for part in index if part is not None}
    return [range(*rows) for rows in sorted(found)]

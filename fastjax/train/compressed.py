"""Gradients summed over devices in 8 or 4 bits, with what rounding leaves over carried into the next step.

R devices, each with its own x of N numbers; q(x) are whole numbers with a scale for each block of 256:

    reduce-scatter   x' = x + e;  q(x') goes out, rank r getting part r of every device;  e <- x' - q(x')
                     s_r = sum over devices of their part r, in float32
    all-gather       s' = s_r + f;  q(s') goes to all;  f <- s' - q(s')

Every device adds the same integers in the same order, so all have the same sum, to the bit. Over many steps the sums of
what was added up and of what should have been differ by what e and f hold, and no more: an error is not lost, only late
(error feedback: arXiv:1809.07599 and, for both ways of the reduction, arXiv:1905.05957).
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from fastjax.kernels.int_blocks import packed_width, quantize_int_blocks, sum_int_blocks
from fastjax.models.parallel import Parallel
from fastjax.models.sharding import BATCH_AXES, leaf_name

_BLOCK_SIZE = 256
# Below this, in numbers a device, there is nothing to save, and norms are sensitive: such a leaf is summed exactly.
_SMALLEST = 4096

BITS = {"int8": 8, "int4": 4}


class Residual(NamedTuple):
    """What rounding one leaf has left over, a row for each device of the mesh.

    Attributes:
      sent: [devices, N] float32, of a device's own gradient, N padded to R parts of whole blocks.
      summed: [devices, N / R] float32, of the sum of its part.
    """

    sent: jax.Array
    summed: jax.Array


class CompressedState(NamedTuple):
    """An optimiser's state, and the residuals of the leaves that travel in few bits, by name."""

    optimizer: Any
    residuals: dict[str, Residual]


def no_residuals(parallel: Parallel, mesh: Mesh, trainable: Any) -> dict[str, Residual]:
    """What nothing is left over in yet: one for each leaf that is worth compressing.

    Args: trainable: with the whole shapes; may be abstract.
    """
    found: dict[str, Residual] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(trainable)[0]:
        name = leaf_name(path)
        num = math.prod(NamedSharding(mesh, parallel.specs[name]).shard_shape(leaf.shape))
        num_ranks = math.prod(mesh.shape[axis] for axis in _row_axes(parallel, name))
        if num >= _SMALLEST and num_ranks > 1:
            found[name] = no_residual(num, num_ranks, mesh.size)
    return found


def no_residual(num: int, num_ranks: int, num_devices: int) -> Residual:
    """A row for each of so many devices, of a leaf of so many numbers a device, summed over so many of them."""
    unit = num_ranks * _BLOCK_SIZE
    size = -(-num // unit) * unit
    return Residual(jnp.zeros((num_devices, size)), jnp.zeros((num_devices, size // num_ranks)))


def compressed_gradients(
    parallel: Parallel, gradients: Any, residuals: dict[str, Residual], bits: int
) -> tuple[Any, dict[str, Residual]]:
    """Each device's part of the whole batch's gradients, as `Parallel.summed_gradients`, and the next residuals.

    Inside `jax.shard_map`, where each device has its own row of the residuals.
    """
    treedef: Any
    flat, treedef = jax.tree_util.tree_flatten_with_path(gradients)
    named = {leaf_name(path): leaf for path, leaf in flat}
    summed = parallel.summed_gradients({name: leaf for name, leaf in named.items() if name not in residuals})
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name in residuals:
        by_axes.setdefault(_row_axes(parallel, name), []).append(name)
    after: dict[str, Residual] = {}
    for axes, names in by_axes.items():
        leaves = []
        for name in names:
            rest = [axis for axis in parallel.gradient_axes(name) if axis not in axes]
            leaves.append(jax.lax.psum(named[name], rest) if rest else named[name])
        own = [Residual(residuals[name].sent[0], residuals[name].summed[0]) for name in names]
        sums, new = compressed_sums(leaves, own, axes, bits)
        summed |= dict(zip(names, sums, strict=True))
        after |= {n: Residual(one.sent[None], one.summed[None]) for n, one in zip(names, new, strict=True)}
    return treedef.unflatten([summed[name] for name in named]), {name: after[name] for name in residuals}


def compressed_sums(
    leaves: list[jax.Array], residuals: list[Residual], axes: tuple[str, ...], bits: int, **how: Any
) -> tuple[list[jax.Array], list[Residual]]:
    """The sums of arrays over the devices along mesh axes, and the residuals of the next step.

    Inside `jax.shard_map`. All arrays travel in one exchange, and all sums in one more.

    Args:
      leaves: any shapes; this device's.
      residuals: of this device, without the dimension of devices.
      axes: names of the mesh axes.
      bits: 8 or 4.
      how: implementation and interpret, see `quantize_int_blocks`.
    Returns: float32 in the arrays' shapes, the same on all these devices.
    """
    num_ranks = jax.lax.axis_size(axes)
    sent, summed, totals = [], [], []
    messages = []
    for x, residual in zip(leaves, residuals, strict=True):
        flat = x.astype(jnp.float32).reshape(-1)
        flat = jnp.pad(flat, (0, residual.sent.size - flat.size)) + residual.sent
        codes, scales, error = quantize_int_blocks(flat, bits, **how)
        messages.append(_message(codes, scales, num_ranks))
        sent.append(error)
    received = jax.lax.all_to_all(jnp.concatenate(messages, axis=1), axes, split_axis=0, concat_axis=0)
    parts = _split(received, messages)
    messages = []
    for part, residual in zip(parts, residuals, strict=True):
        total = sum_int_blocks(*_read(part, bits), bits, **how) + residual.summed
        codes, scales, error = quantize_int_blocks(total, bits, **how)
        messages.append(_message(codes, scales, 1))
        summed.append(error)
    gathered = jax.lax.all_gather(jnp.concatenate(messages, axis=1), axes, tiled=True)
    for x, part in zip(leaves, _split(gathered, messages), strict=True):
        codes, scales = _read(part, bits)
        total = sum_int_blocks(codes.reshape(1, -1), scales.reshape(1, -1), bits, **how)
        totals.append(total[: x.size].reshape(x.shape))
    return totals, [Residual(*one) for one in zip(sent, summed, strict=True)]


def _message(codes: jax.Array, scales: jax.Array, num_ranks: int) -> jax.Array:
    """[num_ranks, bytes] int8: for each rank the codes of its part, and the bytes of their scales."""
    as_bytes = jax.lax.bitcast_convert_type(scales, jnp.int8)
    return jnp.concatenate([codes.reshape(num_ranks, -1), as_bytes.reshape(num_ranks, -1)], axis=1)


def _read(message: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """(codes, scales) of a message, a row a rank."""
    block = packed_width(_BLOCK_SIZE, bits)
    num_blocks = message.shape[1] // (block + 4)
    codes, as_bytes = jnp.split(message, [num_blocks * block], axis=1)
    return codes, jax.lax.bitcast_convert_type(as_bytes.reshape(-1, num_blocks, 4), jnp.float32)


def _split(joined: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    ends = list(itertools.accumulate(one.shape[1] for one in like))
    return jnp.split(joined, ends[:-1], axis=1)


def _row_axes(parallel: Parallel, name: str) -> tuple[str, ...]:
    """The mesh axes of the batch over which a leaf's gradient is still to be summed."""
    return tuple(axis for axis in parallel.gradient_axes(name) if axis in BATCH_AXES)

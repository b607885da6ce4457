"""Arrays from the host to the devices of a run and back, whichever process the devices belong to."""

from typing import Any

import jax
import numpy as np


def to_host(array: jax.Array) -> np.ndarray:
    """The whole array as numpy's. Where other processes hold parts of it, all processes must ask for it together."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def place(tree: Any, sharding: Any) -> Any:
    """The arrays of a tree where `sharding`, one for all or a tree of them, wants them.

    A process copies only what its own devices hold; all processes must have the same values.
    """
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: _place(leaf, sharding), tree)
    return jax.tree.map(_place, tree, sharding)


def _place(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    elsewhere = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if sharding.is_fully_addressable or elsewhere:
        return jax.device_put(leaf, sharding)
    # device_put would first compare the values of all processes, byte by byte through the network.
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

"""Weights that lie on a mesh, whoever put them there, and how each is split."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fastjax.models.config import ModelConfig
from fastjax.models.host import place
from fastjax.models.parallel import Parallel
from fastjax.models.sharding import AXES, Layout, leaf_name


@dataclass(frozen=True)
class Spread:
    """How a model's weights lie on a mesh of several devices.

    Attributes:
      specs: (name, how it is split) of every leaf.
    """

    config: ModelConfig
    mesh: Mesh
    specs: tuple[tuple[str, PartitionSpec], ...]

    def tree(self, state: Any) -> Any:
        """The specs as a tree like `state`."""
        specs = dict(self.specs)
        return jax.tree_util.tree_map_with_path(lambda path, _: specs[leaf_name(path)], state)

    def parallel(self, *, split_rows: bool) -> Parallel:
        """One device's part in the model, see `Parallel`."""
        return Parallel(Layout.of(self.config, self.mesh), dict(self.specs), split_rows)


def spread_of(config: ModelConfig, state: Any) -> tuple[Any, Spread | None]:
    """A model's state, and how it is spread; None where all of it is on one device.

    What is not on the mesh of the others yet, an adapter that was loaded later, is put there.
    """
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)]
    mesh = max((mesh for mesh in meshes if mesh.axis_names == AXES), key=lambda mesh: mesh.size, default=None)
    if mesh is None or mesh.size == 1:
        return state, None
    layout = Layout.of(config, mesh)

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == mesh:
            return leaf
        return place(leaf, NamedSharding(mesh, layout.spec(leaf_name(path), leaf.shape, trained=False)))

    state = jax.tree_util.tree_map_with_path(one, state)
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return state, Spread(config, mesh, tuple((leaf_name(path), leaf.sharding.spec) for path, leaf in flat))

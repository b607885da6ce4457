"""What a compiled step needs of a device's memory, as its compiler reports it."""

import math
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one compiled step.

    Attributes:
      arguments: weights, adapters, optimiser states, batch.
      workspace: everything that is made on the way, kept activations included.
      outputs: results that do not take an argument's place.
      host: in host memory.
    """

    arguments: int
    workspace: int
    outputs: int
    host: int

    @property
    def peak(self) -> int:
        """On the device, all together."""
        return self.arguments + self.workspace + self.outputs


def read_memory(compiled: Any) -> StepMemory:
    """Of what `jax.jit(...).lower(...).compile()` gave."""
    report = compiled.memory_analysis()
    return StepMemory(
        arguments=report.argument_size_in_bytes,
        workspace=report.temp_size_in_bytes,
        outputs=report.output_size_in_bytes - report.alias_size_in_bytes,
        host=report.host_temp_size_in_bytes,
    )


def num_bytes(tree: Any, *, per_device: bool = False) -> int:
    """Of a tree's arrays, abstract ones too; `per_device` counts what one device of their shardings holds."""
    leaves = jax.tree.leaves(tree)
    shapes = [leaf.sharding.shard_shape(leaf.shape) if per_device else leaf.shape for leaf in leaves]
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))

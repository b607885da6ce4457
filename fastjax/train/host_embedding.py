"""The embedding's table in host memory: a batch brings its rows along, and the device holds no table.

The table is frozen, so nothing but a look-up ever needs it. The rows wait in pinned host memory, and the step copies
those of one micro-batch at a time to the device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.train.config import TrainConfig
from fastjax.train.loss import ROWS

_PATH = ("embed_tokens", "weight")


def check_offload(config: TrainConfig, model: ModelConfig) -> None:
    """Raises: UserError if offload_embedding is asked for where the table is read or changed on the device."""
    if not config.offload_embedding:
        return
    why = None
    if config.method == "full":
        why = "method=full trains the embedding, and what is trained lies on the device; use method=lora or qlora"
    elif any(name.endswith("embed_tokens") for name in config.modules_to_save or ()):
        why = "modules_to_save trains embed_tokens, and what is trained lies on the device; leave one of the two out"
    elif model.tie_word_embeddings:
        why = (
            "this model's head is its embedding, which the loss reads whole on the device; leave offload_embedding out"
        )
    elif config.mesh_shape is None or np.prod(config.mesh_shape) > 1:
        why = f"mesh={config.mesh!r}: it works on one device only; use mesh=data=1, or leave offload_embedding out"
    if why is not None:
        raise UserError(f"offload_embedding: {why}")


def take_table(frozen: Any) -> tuple[Any, Any]:
    """(frozen leaves without the embedding's rows, the [V, D] table); both may be abstract."""
    flat, table = [], None
    for path, variable in nnx.to_flat_state(frozen):
        if path == _PATH:
            table = variable.get_value()
            shape = (0, table.shape[1])
            is_array = isinstance(table, jax.Array)
            nothing = jnp.zeros(shape, table.dtype) if is_array else jax.ShapeDtypeStruct(shape, table.dtype)
            variable = variable.replace(nothing)
        flat.append((path, variable))
    assert table is not None, "check_offload lets frozen embeddings through only"
    return nnx.from_flat_state(flat), table


class HostTable:
    """A model's embedding while its table is in host memory."""

    def __init__(self, model: CausalLM, table: jax.Array) -> None:
        self._model, self._sharding = model, table.sharding
        # A copy also where device and host are one, as on a CPU.
        self._table = np.array(table)
        self._dtype = model.dtype

    def with_rows(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A host batch with the rows of its input_ids."""
        return {**batch, ROWS: self._table[np.asarray(batch["input_ids"])].astype(self._dtype)}

    def put_back(self) -> None:
        """Gives the model its table on the device again."""
        self._model.embed_tokens.weight.set_value(jax.device_put(self._table, self._sharding))


@contextmanager
def offloaded(model: CausalLM, frozen: Any, wanted: bool) -> Iterator[tuple[Any, HostTable | None]]:
    """(frozen leaves, the table in host memory), with no copy on the device until the end.

    Args:
      wanted: False changes nothing, and the table is None.
      frozen: of `split_trainable(model, ...)`, on the device.
    """
    if not wanted:
        yield frozen, None
        return
    rest, on_device = take_table(frozen)
    table = HostTable(model, on_device)
    nnx.update(model, rest)
    # The last holder is the caller's tree, which is given up for `rest`.
    del frozen, on_device
    try:
        yield rest, table
    finally:
        table.put_back()

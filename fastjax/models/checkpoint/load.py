"""Weights from a checkpoint into a CausalLM on the device, one tensor at a time."""

import dataclasses
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fastjax.errors import UserError
from fastjax.models.checkpoint.checkpoint import Checkpoint, TensorSource
from fastjax.models.checkpoint.names import EMBEDDING, HEAD, check_names, places
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM


def load_model(model: str | Checkpoint, dtype: Any = jnp.bfloat16, mesh: Mesh | None = None) -> CausalLM:
    """The model with its weights on the device in `dtype`, which is also the dtype it computes in.

    Every tensor is read, cast once and copied into its row of a stacked buffer that already lies on the device; the
    host holds one tensor at a time.

    Args:
      model: folder, .gguf file, hub id, or what `open_checkpoint` returned.
      dtype: bfloat16 or float32.
      mesh: devices that get a copy each; None means jax's default device.
    Raises: UserError if the checkpoint is missing or unsound, its config is not supported, its tensors do not fit the
      config (file, key and expected shape are named), or the dtype is another one.
    """
    if jnp.dtype(dtype).name not in ("bfloat16", "float32"):
        raise UserError(
            f"dtype={jnp.dtype(dtype).name}: models compute in bfloat16 or float32. There is no loss scaling here, "
            "which float16 needs, and every supported card has bfloat16."
        )
    checkpoint = open_checkpoint(model) if isinstance(model, str) else model
    config = ModelConfig.from_hf(checkpoint.config)
    source = checkpoint.tensors
    if config.tie_word_embeddings and HEAD in source.names():
        config, source = _settle_head(config, source)
    abstract = CausalLM.abstract(config, dtype=dtype, param_dtype=dtype)
    graphdef, state = nnx.split(abstract)
    leaves = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    expected = places({path: variable.shape for path, variable in leaves.items()})
    check_names(source, expected)
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    buffers = {path: _empty(variable.shape, variable.dtype, sharding) for path, variable in leaves.items()}
    for name in source.names():
        place = expected.get(name)
        if place is None:
            continue  # a buffer that check_names lets pass
        target = buffers.pop(place.path)  # the only reference, so that it can be donated
        # np.array copies: what jax gets is memory of its own in the target dtype, not a map of the file.
        value = jax.device_put(np.array(source.read(name), dtype=target.dtype, order="C"), sharding)
        buffers[place.path] = _put(target, value, 0 if place.layer is None else place.layer, place.layer is not None)
        # Without waiting, the host would run ahead of the copies and hold every tensor that is still under way.
        buffers[place.path].block_until_ready()
    flat = nnx.to_flat_state(state)
    filled = [(path, variable.replace(buffers[".".join(map(str, path))])) for path, variable in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _settle_head(config: ModelConfig, source: TensorSource) -> tuple[ModelConfig, TensorSource]:
    """What to do with lm_head.weight in a checkpoint whose config says that it is the embedding.

    Equal to the embedding, it is a second copy and dropped. Different, it is kept and the model is untied, as
    transformers 5 does: what was trained is in the file, and the config is the likelier mistake.
    """
    head = source.info(HEAD)
    same_shape = EMBEDDING in source.names() and source.info(EMBEDDING).shape == head.shape
    if same_shape and np.array_equal(source.read(HEAD), source.read(EMBEDDING)):
        return config, _Without(source, HEAD)
    warnings.warn(
        f"{head.file}: {HEAD} differs from {EMBEDDING} although config.json has tie_word_embeddings: true; "
        "the two are kept apart, as transformers does. Set tie_word_embeddings to false to silence this.",
        stacklevel=3,
    )
    return dataclasses.replace(config, tie_word_embeddings=False), source


class _Without:
    """A TensorSource less one name."""

    def __init__(self, source: TensorSource, name: str) -> None:
        self._source, self._name = source, name
        self.info, self.read, self.describe = source.info, source.read, source.describe

    def names(self) -> list[str]:
        return [name for name in self._source.names() if name != self._name]


def _empty(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> jax.Array:
    return jnp.zeros(shape, dtype, device=sharding)


@partial(jax.jit, static_argnames="stacked", donate_argnums=0)
def _put(buffer: jax.Array, value: jax.Array, layer: int | jax.Array, stacked: bool) -> jax.Array:
    if not stacked:
        return jax.lax.dynamic_update_slice(buffer, value, (0,) * buffer.ndim)
    return jax.lax.dynamic_update_index_in_dim(buffer, value, layer, 0)

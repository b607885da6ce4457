"""Weights from a checkpoint into a CausalLM on the device, one tensor at a time."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fastjax.errors import UserError
from fastjax.models.checkpoint.buffers import empty, filled
from fastjax.models.checkpoint.checkpoint import Checkpoint, TensorSource
from fastjax.models.checkpoint.names import EMBEDDING, HEAD, check_names, places
from fastjax.models.checkpoint.packed import lay_out_packed, planned_formats
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.quant_config import QuantConfig
from fastjax.models.quantized import full_shape
from fastjax.models.sharding import Layout


def load_model(
    model: str | Checkpoint,
    dtype: Any = jnp.bfloat16,
    mesh: Mesh | None = None,
    *,
    quantization: QuantConfig | None = None,
    quantize_from: Any = None,
) -> CausalLM:
    """The model with its weights on the device in `dtype`, which is also the dtype it computes in.

    Every tensor is read, cast once and copied into its row of a stacked buffer that already lies on the device; the
    host holds one tensor at a time, and a device never more of it than its part. 4-bit weights keep their bytes.

    Args:
      model: folder, .gguf file, hub id, or what `open_checkpoint` returned.
      dtype: bfloat16 or float32.
      mesh: devices with the axes data, fsdp and tensor, among which `fastjax.models.sharding` splits the weights; None
        means jax's default device.
      quantization: quantise the linear layers of the decoder, but not the head, on the device as they arrive. What is
        quantised is the weight in `quantize_from`. A checkpoint that is 4-bit already stays as it is.
      quantize_from: bfloat16 or float32; None means `dtype`.
    Raises: UserError if the checkpoint is missing or unsound, its config is not supported, its tensors do not fit the
      config (file, key and expected shape are named), or the dtype is another one.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in ("bfloat16", "float32"):
        raise UserError(
            f"dtype={dtype.name}: models compute in bfloat16 or float32. There is no loss scaling here, "
            "which float16 needs, and every supported card has bfloat16."
        )
    checkpoint = open_checkpoint(model) if isinstance(model, str) else model
    config = ModelConfig.from_hf(checkpoint.config)
    source = checkpoint.tensors
    if config.tie_word_embeddings and HEAD in source.names():
        config, source = _settle_head(config, source)
    abstract = CausalLM.abstract(config, dtype=dtype, param_dtype=dtype)
    expected = places({path: full_shape(value) for path, value in _leaves(abstract).items()})
    check_names(source, expected)
    formats = {name: source.info(name).packed for name in expected}
    if quantization is not None and checkpoint.quantization is None:
        formats = planned_formats(quantization, expected, jnp.dtype(quantize_from or dtype).name)
    lay_out_packed(abstract, formats, expected, source)
    layout = None if mesh is None else Layout.of(config, mesh)
    buffers = {path: empty(path, value, layout, mesh) for path, value in _leaves(abstract).items()}
    for name in source.names():
        place = expected.get(name)
        if place is None:
            continue  # a buffer that check_names lets pass
        target = buffers.pop(place.path)  # the only reference, so that it can be donated
        buffers[place.path] = filled(target, source.read(name), place.layer, dtype, formats[name])
        # Without waiting, the host would run ahead of the copies and hold every tensor that is still under way.
        jax.block_until_ready(buffers[place.path])
    graphdef, state = nnx.split(abstract)
    flat = nnx.to_flat_state(state)
    weights = [(path, variable.replace(buffers[".".join(map(str, path))])) for path, variable in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(weights))


def _leaves(model: CausalLM) -> dict[str, Any]:
    """Our path -> value of every variable."""
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}


def _settle_head(config: ModelConfig, source: TensorSource) -> tuple[ModelConfig, TensorSource]:
    """What to do with lm_head.weight in a checkpoint whose config says that it is the embedding.

    Equal to the embedding, it is a second copy and dropped. Different, it is kept and the model is untied, as
    transformers 5 does: what was trained is in the file, and the config is the likelier mistake.
    """
    head = source.info(HEAD)
    same_shape = EMBEDDING in source.names() and source.info(EMBEDDING).shape == head.shape
    both: Any = [source.read(name) for name in (HEAD, EMBEDDING)] if same_shape and head.packed is None else None
    if both is not None and np.array_equal(*both):
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

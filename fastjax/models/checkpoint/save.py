"""A CausalLM written as a folder that transformers loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import replace_folder, write_json
from fastjax.models.checkpoint.names import places
from fastjax.models.checkpoint.safetensors_header import read_header
from fastjax.models.checkpoint.safetensors_io import LazyTensor, write_safetensors
from fastjax.models.checkpoint.tokenizer import save_tokenizer
from fastjax.models.decoder import CausalLM

_DTYPES = ("bfloat16", "float16", "float32")
# In the weights' own metadata, since other programs carry the keys of a config.json over into what they write.
_MARK = {"written_by": "fastjax"}


def save_model(
    model: CausalLM,
    folder: str | Path,
    *,
    dtype: Any = None,
    tokenizer: Any = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes config.json, the weights and what goes with them; the folder appears complete or not at all.

    Tensors leave the device one at a time. A model whose head is its embedding is written without lm_head.weight.

    Args:
      model: without adapters; merge them first.
      folder: is made, together with its parents.
      dtype: of the written weights: bfloat16, float16 or float32; None means the one the model computes in
        (`model.dtype`): weights trained in full are float32 in memory, and their float32 is the optimiser's.
      tokenizer: is saved with its chat template.
      generation_config: contents of generation_config.json, written unchanged even if transformers would refuse them.
      max_shard_bytes: weights above this size are split into files of at most that size, with an index.
      overwrite: replace the model in a folder that is not empty; other files stay, see `replace_folder`.
    Raises: UserError if the folder is not empty, the dtype is another one, or an adapter is attached.
    """
    dtype = jnp.dtype(model.dtype if dtype is None else dtype)
    if dtype.name not in _DTYPES:
        raise UserError(f"dtype={dtype.name} for a saved model; it must be one of {', '.join(_DTYPES)}")
    tensors = _tensors(model, dtype)
    with replace_folder(Path(folder), overwrite) as target:
        config = {**model.config.to_hf(), "dtype": dtype.name, "torch_dtype": dtype.name}
        config["tie_word_embeddings"] = model.lm_head is None
        write_json(target / "config.json", config)
        if generation_config is not None:
            write_json(target / "generation_config.json", dict(generation_config))
        if tokenizer is not None:
            save_tokenizer(tokenizer, target)
        _write_weights(target, tensors, max_shard_bytes)


def is_saved_model(folder: Path) -> bool:
    """Whether the weights in `folder` are ones that `save_model` wrote."""
    files = sorted(folder.glob("model*.safetensors"))
    try:
        return bool(files) and all(read_header(file).metadata.items() >= _MARK.items() for file in files)
    except UserError:
        return False


def _tensors(model: CausalLM, dtype: Any) -> dict[str, LazyTensor]:
    leaves = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    adapters = [path for path in leaves if ".lora." in path]
    if adapters:
        raise UserError(f"the model has adapters ({adapters[0]}, ...); merge them before it is saved as a model")
    return {
        name: LazyTensor(place.shape, dtype, lambda place=place: _fetch(leaves[place.path], place.layer, dtype))  # type: ignore[misc]
        for name, place in places({path: leaf.shape for path, leaf in leaves.items()}).items()
    }


def _fetch(leaf: jax.Array, layer: int | None, dtype: Any) -> np.ndarray:
    # The cast runs on the device; bfloat16 and float16 halve what has to be copied.
    return np.asarray((leaf if layer is None else leaf[layer]).astype(dtype))


def _write_weights(folder: Path, tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors.items():
        size = int(np.prod(tensor.shape)) * tensor.dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
        total += size
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0], _MARK)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, _MARK)
        weight_map |= dict.fromkeys(shard, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})

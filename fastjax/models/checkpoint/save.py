"""A CausalLM written as a folder that transformers loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import replace_folder, write_json
from fastjax.models.checkpoint.safetensors_header import read_header
from fastjax.models.checkpoint.safetensors_io import LazyTensor, read_all, write_safetensors
from fastjax.models.checkpoint.tensors import FORMS, model_tensors, quantization_of
from fastjax.models.checkpoint.tokenizer import save_tokenizer
from fastjax.models.decoder import CausalLM
from fastjax.models.quantized import is_quantized

_DTYPES = ("bfloat16", "float16", "float32")
# In the weights' own metadata, since other programs carry the keys of a config.json over into what they write.
_MARK = {"written_by": "fastjax"}


def save_model(
    model: CausalLM,
    folder: str | Path | None,
    *,
    dtype: Any = None,
    form: str = "as_is",
    tokenizer: Any = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes config.json, the weights and what goes with them; the folder appears complete or not at all.

    Tensors leave the device one at a time, and are merged or decoded one at a time: the model in memory is neither
    changed nor copied. A model whose head is its embedding is written without lm_head.weight.

    Args:
      model: with adapters only where `form` merges them.
      folder: is made, together with its parents. None reads every tensor and writes nothing: of several processes all
        have to read, and one writes.
      dtype: of the written weights that are not 4-bit: bfloat16, float16 or float32; None means the one the model
        computes in (`model.dtype`): weights trained in full are float32 in memory, and their float32 is the
        optimiser's.
      form: "as_is" writes 4-bit weights in bitsandbytes' form; "merged" decodes them and adds the adapters,
        W + scale B A summed in float32 and rounded once; "merged_4bit" quantises that sum again wherever the model is
        4-bit, which loses what of the adapters is below a step of the 4-bit grid.
      tokenizer: is saved with its chat template.
      generation_config: contents of generation_config.json, written unchanged even if transformers would refuse them.
      max_shard_bytes: weights above this size are split into files of at most that size, with an index.
      overwrite: replace the model in a folder that is not empty; other files stay, see `replace_folder`.
    Raises: UserError if the folder is not empty, the dtype is another one, or an adapter is attached that `form` does
      not merge.
    """
    dtype = jnp.dtype(model.dtype if dtype is None else dtype)
    if dtype.name not in _DTYPES:
        raise UserError(f"dtype={dtype.name} for a saved model; it must be one of {', '.join(_DTYPES)}")
    assert form in FORMS, form
    tensors = model_tensors(model, dtype, form)
    if folder is None:
        for shard in _shards(tensors, max_shard_bytes):
            read_all(shard)
        return
    with replace_folder(Path(folder), overwrite) as target:
        config = {**model.config.to_hf(), "dtype": dtype.name, "torch_dtype": dtype.name}
        config["tie_word_embeddings"] = model.lm_head is None
        if form != "merged" and is_quantized(model):
            config["quantization_config"] = quantization_of(model).to_hf(dtype.name)
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


def _shards(tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> list[dict[str, LazyTensor]]:
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = _num_bytes(tensor)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards


def _num_bytes(tensor: LazyTensor) -> int:
    return int(np.prod(tensor.shape)) * tensor.dtype.itemsize


def _write_weights(folder: Path, tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> None:
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0], _MARK)
        return
    total = sum(map(_num_bytes, tensors.values()))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, _MARK)
        weight_map |= dict.fromkeys(shard, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})

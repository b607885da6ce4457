"""What a model argument leads to: its config, and its tensors under HF's names, none of them read yet."""

import warnings
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fastjax.errors import UserError
from fastjax.models.checkpoint.bitsandbytes import BitsandbytesSource, has_packed_weights
from fastjax.models.checkpoint.checkpoint import Checkpoint, TensorInfo, TensorSource
from fastjax.models.checkpoint.files import read_json
from fastjax.models.checkpoint.hub import resolve_model
from fastjax.models.checkpoint.names import check_sizes
from fastjax.models.checkpoint.safetensors_io import SafetensorsFile
from fastjax.models.quant_config import QuantConfig
from fastjax.models.values import INT32_MAX, shown, token_ids

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_NAME = 255  # bytes in one part of a path, on every common file system


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Opens an HF folder, a .gguf file or a hub id; headers are checked, tensors are not read.

    Code and pickles that lie in a model folder (auto_map, pytorch_model.bin) are never run or loaded.

    Args:
      revision: branch, tag or commit of a hub id.
    Raises: UserError if there is no such model, or its files are missing or unsound.
    """
    path = resolve_model(model, revision)
    if path.is_file():
        from fastjax.models.checkpoint.gguf_io import open_gguf

        checkpoint = open_gguf(model, path)
        check_sizes(checkpoint.tensors, checkpoint.config)
        return checkpoint
    config = read_json(path / "config.json")
    generation_config = None
    if (path / "generation_config.json").exists():
        generation_config = read_json(path / "generation_config.json")
        _check_token_ids(path / "generation_config.json", generation_config, config.get("vocab_size"))
        _complain(path / "generation_config.json", generation_config)
    tensors, quantization = _with_4bit(SafetensorsSource(path), config)
    check_sizes(tensors, config)
    return Checkpoint(model, path, config, generation_config, tensors, quantization=quantization)


def _with_4bit(source: TensorSource, config: Mapping[str, Any]) -> tuple[TensorSource, QuantConfig | None]:
    """The tensors with bitsandbytes' 4-bit weights put together, and what config.json says of them."""
    packed = has_packed_weights(source)
    if not config.get("quantization_config"):
        if packed:
            raise UserError(f"{source.describe()} holds 4-bit weights, and config.json has no quantization_config")
        return source, None
    quantization = QuantConfig.from_hf(config["quantization_config"])
    if not packed:
        raise UserError(
            f"config.json has the quantization_config of 4-bit weights, and {source.describe()} holds none; remove "
            "quantization_config, and ask for 4 bit when the model is loaded"
        )
    return BitsandbytesSource(source), quantization


class SafetensorsSource:
    """The tensors of a folder with model.safetensors, or with shards and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, SafetensorsFile] = {}
        if (folder / _INDEX).exists():
            self._open_shards(folder / _INDEX)
        elif (folder / _SINGLE).exists():
            self._add(SafetensorsFile(folder / _SINGLE))
        else:
            raise _no_weights(folder)

    def names(self) -> list[str]:
        return list(self._files)

    def info(self, name: str) -> TensorInfo:
        file = self._files[name]
        entry = file.header.entries[name]
        return TensorInfo(entry.shape, entry.dtype.name, file.path)

    def read(self, name: str) -> np.ndarray:
        return self._files[name].read(name)

    def describe(self) -> str:
        paths = sorted({file.path for file in self._files.values()})
        return str(paths[0]) if len(paths) == 1 else f"{self._folder} ({len(paths)} safetensors files)"

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise UserError(f"{index} has no weight_map from tensor names to file names")
        for shard in dict.fromkeys(weight_map.values()):
            path = _inside(index, shard)
            if not path.is_file():
                raise UserError(f"{index} names the file {shard}, which is not in the folder; fetch it again")
            self._add(SafetensorsFile(path))
        for name, shard in weight_map.items():
            if name not in self._files or self._files[name].path != self._folder / shard:
                raise UserError(f"{index} says that {shard} holds {name}, and it does not")

    def _add(self, file: SafetensorsFile) -> None:
        for name in file.names():
            if name in self._files:
                raise UserError(f"{name} is in both {self._files[name].path} and {file.path}; remove one of the files")
            self._files[name] = file


def _inside(index: Path, shard: str) -> Path:
    # The name may not lead out of the folder. What it names may be a link: the hub's cache is made of links.
    parts = PurePosixPath(shard)
    too_long = any(len(part.encode("utf-8", "replace")) > _LONGEST_NAME for part in parts.parts) or len(shard) > 1024
    if not shard or parts.is_absolute() or ".." in parts.parts or "\\" in shard or "\0" in shard or too_long:
        raise UserError(f"{index} names the file {shown(shard)}, which is not a plain name inside the folder")
    return index.parent / shard


def _no_weights(folder: Path) -> UserError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return UserError(f"{folder} has no {_SINGLE}; to use its GGUF file, give {folder / ggufs[0]} as the model")
    if pickles:
        return UserError(
            f"{folder} has its weights only as {pickles[0]}, a pickle, which can run code when it is loaded and is "
            "never read here; convert it to safetensors (save_pretrained of transformers does) and use that folder"
        )
    return UserError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _check_token_ids(path: Path, config: Mapping[str, Any], vocab_size: Any) -> None:
    size = vocab_size if isinstance(vocab_size, int) else INT32_MAX  # a bad size is ModelConfig's to refuse
    for key in ("bos_token_id", "eos_token_id"):
        token_ids(config.get(key), f"{path}: {key}", size)
    if config.get("pad_token_id") != -1:  # the first Llamas say so for none
        token_ids(config.get("pad_token_id"), f"{path}: pad_token_id", size)


def _complain(path: Path, config: Mapping[str, Any]) -> None:
    # transformers refuses to save such a file, sometimes after hours of training. Here it is carried over as it is.
    if config.get("do_sample", False):
        return
    neutral = {"temperature": (1.0, 0.0), "top_p": (1.0,), "top_k": (50, 0), "min_p": (), "typical_p": (1.0,)}
    idle = [key for key, values in neutral.items() if config.get(key) is not None and config[key] not in values]
    if idle:
        settings = ", ".join(f"{key}={shown(config[key])}" for key in idle)
        warnings.warn(f"{path}: {settings} has no effect without do_sample; carried over unchanged", stacklevel=3)

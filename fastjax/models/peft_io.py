"""Adapter folders as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fastjax.errors import UserError
from fastjax.models.base_form import WEIGHTS_NAME, base_metadata
from fastjax.models.checkpoint.files import read_json, write_json
from fastjax.models.checkpoint.safetensors_io import LazyTensor, SafetensorsFile, read_all, write_safetensors
from fastjax.models.decoder import CausalLM
from fastjax.models.host import to_host
from fastjax.models.layers import Linear, Lora
from fastjax.models.lora import attach, layer_slice, module_at
from fastjax.models.lora_config import (
    ALL_LINEAR,
    EMBEDDING,
    HEAD,
    AdapterPlan,
    LoraConfig,
    Target,
    plan_adapter,
)
from fastjax.models.lora_config import Path as ModulePath
from fastjax.models.peft_config import config_from_peft, config_to_peft

CONFIG_NAME, PICKLE_NAME = "adapter_config.json", "adapter_model.bin"

_PREFIX = "base_model.model."
# The adapter's name stands in keys of a raw state dict, and is left out by PEFT's own save.
_LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_SAVED_KEY = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.[^.]+)?|\.(?P<base>base_layer))?\.weight")

_FLOATS = ("float32", "float16", "bfloat16")


def save_adapter(
    model: CausalLM, config: LoraConfig, folder: str | os.PathLike[str] | None, base_model_name: str | None = None
) -> None:
    """Writes the adapter of `model` so that `peft.PeftModel.from_pretrained` loads it.

    The weights' metadata says how the base is held (`base_form`). Tensors are float32, cut to each layer's own rank.
    Both files are written under temporary names and renamed, the tensors first; other files in the folder are left
    alone.

    Args:
      config: what the adapter was made from.
      folder: None reads every tensor and writes nothing: of several processes all have to read, and one writes.
      base_model_name: folder or hub id that PEFT should find the base model under.
    Raises: UserError if the model has no adapter, or another than `config` describes.
    """
    plan = plan_adapter(config, model, strict=False)
    _check_same(model, plan)
    tensors: dict[str, np.ndarray | LazyTensor] = {}
    for path, targets in plan.by_path().items():
        lora: Lora = module_at(model, path).lora
        lora_a, lora_b = to_host(lora.lora_a[...]), to_host(lora.lora_b[...])
        for target in targets:
            layer, rank = layer_slice(target), slice(target.rank)
            tensors[f"{_PREFIX}{target.name}.lora_A.weight"] = np.asarray(lora_a[(*layer, rank)])
            tensors[f"{_PREFIX}{target.name}.lora_B.weight"] = np.asarray(lora_b[(*layer, slice(None), rank)])
    for name in _saved_names(plan):
        tensors[f"{_PREFIX}{name}.weight"] = _lazily(_trained_weight(model, name))
    if folder is None:
        read_all(tensors)
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS_NAME, tensors, base_metadata(model))
    write_json(folder / CONFIG_NAME, config_to_peft(config, _target_names(config, plan), base_model_name))


def load_adapter(model: CausalLM, folder: str | os.PathLike[str]) -> LoraConfig:
    """Adds the adapter in `folder`, made by PEFT or by us, to `model`, ready for use and for further training.

    Everything is checked before the model is touched. Values become float32, exactly.

    Returns: the adapter's settings, which `save_adapter` takes again.
    Raises: UserError if a file is missing or unsound, if the adapter is of a kind that we do not compute, or if its
      tensors are not exactly those that its settings call for on this model.
    """
    folder = Path(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} has no {CONFIG_NAME}; an adapter folder holds it and {WEIGHTS_NAME}")
    config = config_from_peft(read_json(folder / CONFIG_NAME), folder / CONFIG_NAME)
    if not (folder / WEIGHTS_NAME).is_file():
        if (folder / PICKLE_NAME).exists():
            raise UserError(
                f"{folder} has {PICKLE_NAME} only, a pickle, which can run code when it is read; fastjax never reads "
                f"it. Load the adapter with PEFT where you trust it, and save it again: that writes {WEIGHTS_NAME}"
            )
        raise UserError(f"{folder} has no {WEIGHTS_NAME}")
    file = SafetensorsFile(folder / WEIGHTS_NAME)
    plan = plan_adapter(config, model, strict=False)
    factors, trained = _sort_keys(file, plan, model)
    _check_factors(file, factors, plan, model)
    _check_trained(file, trained, plan, model)
    file.verify()

    def from_file(path: ModulePath, targets: Sequence[Target], linear: Linear) -> tuple[np.ndarray, np.ndarray]:
        *stack, out_features, in_features = linear.shape
        rank = max(target.rank for target in targets)
        lora_a = np.zeros((*stack, rank, in_features), np.float32)
        lora_b = np.zeros((*stack, out_features, rank), np.float32)
        for target in targets:
            layer, r = layer_slice(target), slice(target.rank)
            lora_a[(*layer, r)] = file.read(factors[target.name, "A"])
            lora_b[(*layer, slice(None), r)] = file.read(factors[target.name, "B"])
        return lora_a, lora_b

    attach(model, plan, config.lora_dropout, from_file)
    for name in plan.trained:
        _set_trained(model, name, file.read(trained[name]).astype(np.float32))
    return config


def _target_names(config: LoraConfig, plan: AdapterPlan) -> list[str] | str:
    """target_modules as it is written: other programs read lists, and not all of them know the shorthand."""
    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR:
        return sorted({target.name.rpartition(".")[2] for target in plan.targets})
    return config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)


def _check_same(model: CausalLM, plan: AdapterPlan) -> None:
    for path, targets in plan.by_path().items():
        lora = getattr(module_at(model, path), "lora", None)
        rank = max(target.rank for target in targets)
        if lora is None or lora.lora_a.shape[-2] != rank:
            found = "none" if lora is None else f"rank {lora.lora_a.shape[-2]}"
            raise UserError(f"the config calls for rank {rank} on {targets[0].name}, and the model has {found} there")


def _saved_names(plan: AdapterPlan) -> tuple[str, ...]:
    # PEFT writes a tied pair twice.
    return (EMBEDDING, HEAD) if plan.keep_tied and plan.trained else plan.trained


def _trained_weight(model: CausalLM, name: str) -> jax.Array:
    return model.embed_tokens.weight[...] if name == EMBEDDING else model.head_weight()


def _set_trained(model: CausalLM, name: str, value: np.ndarray) -> None:
    owner: Any = model.embed_tokens if name == EMBEDDING or model.lm_head is None else model.lm_head
    owner.weight.set_value(jax.numpy.asarray(value))


def _lazily(weight: jax.Array) -> LazyTensor:
    return LazyTensor(tuple(weight.shape), np.dtype(weight.dtype), lambda: to_host(weight))


def _sort_keys(
    file: SafetensorsFile, plan: AdapterPlan, model: CausalLM
) -> tuple[dict[tuple[str, str], str], dict[str, str]]:
    """Keys of the file by what they are for: {(module, "A" or "B"): key}, {trained module: key}.

    Raises: UserError for a key that has no use, or two with the same.
    """
    targets = {target.name for target in plan.targets}
    factors: dict[tuple[str, str], str] = {}
    trained: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    strangers: list[str] = []
    for key in file.names():
        bare = key.removeprefix(_PREFIX)
        lora, saved = _LORA_KEY.fullmatch(bare), _SAVED_KEY.fullmatch(bare)
        if bare == key:
            strangers.append(key)
        elif lora and lora["module"] in targets:
            _claim(factors, (lora["module"], lora["side"]), key, file)
        elif saved and saved["module"] in _saved_names(plan) and not saved["base"]:
            _claim(trained, saved["module"], key, file)
        elif saved and saved["module"] in (EMBEDDING, HEAD) and "lora_" not in bare:
            copies.append((saved["module"], key))
        else:
            strangers.append(key)
    if strangers:
        raise UserError(
            f"{file.path}: {_some(strangers)} match nothing that {CONFIG_NAME} calls for on this model"
            f"{_hint(strangers)}"
        )
    for name, key in copies:
        _check_copy(file, key, _trained_weight(model, name))
    return factors, trained


def _check_copy(file: SafetensorsFile, key: str, base: jax.Array) -> None:
    # PEFT adds the base's own embedding or head to the file when an adapter sits on it. Equal to ours it says nothing.
    entry = file.header.entries[key]
    if entry.shape == base.shape and entry.dtype.name in _FLOATS:
        given = file.read(key).astype(base.dtype)
        if np.array_equal(given.view(np.uint8), np.ascontiguousarray(to_host(base)).view(np.uint8)):
            return
    raise UserError(
        f"{file.path}: {key} is another weight than the base model's, and modules_to_save does not name it; load the "
        "base model that the adapter was trained on, or merge the adapter with PEFT"
    )


def _check_factors(
    file: SafetensorsFile, factors: Mapping[tuple[str, str], str], plan: AdapterPlan, model: CausalLM
) -> None:
    for target in plan.targets:
        keys = {side: factors.get((target.name, side)) for side in "AB"}
        absent = [f"lora_{side}" for side, key in keys.items() if key is None]
        if absent:
            what = f"has no {absent[0]}" if len(absent) == 1 else "has no tensors"
            raise UserError(f"{file.path}: {target.name} {what}, and {CONFIG_NAME} calls for an adapter there")
        out_features, in_features = _features(model, target.path)
        for side, shape in (("A", (target.rank, in_features)), ("B", (out_features, target.rank))):
            _check_entry(file, str(keys[side]), shape, f" (rank {target.rank} in {CONFIG_NAME})")


def _check_trained(file: SafetensorsFile, trained: Mapping[str, str], plan: AdapterPlan, model: CausalLM) -> None:
    for name in plan.trained:
        if name not in trained:
            raise UserError(f"{file.path} has no weight of {name}, which modules_to_save in {CONFIG_NAME} calls for")
        _check_entry(file, trained[name], tuple(_trained_weight(model, name).shape), "")


def _features(model: CausalLM, path: ModulePath) -> tuple[int, int]:
    """[out, in] of one layer's weight; a tied head has the embedding's."""
    tied = path == (HEAD,) and model.lm_head is None
    out_features, in_features = (model.embed_tokens.weight if tied else module_at(model, path)).shape[-2:]
    return out_features, in_features


def _check_entry(file: SafetensorsFile, key: str, shape: tuple[int, ...], why: str) -> None:
    entry = file.header.entries[key]
    if entry.shape != shape:
        raise UserError(f"{file.path}: {key} has shape {list(entry.shape)}, expected {list(shape)}{why}")
    if entry.dtype.name not in _FLOATS:
        raise UserError(f"{file.path}: {key} has dtype {entry.dtype.name}; {', '.join(_FLOATS)} are read")


def _claim(found: dict[Any, str], what: Any, key: str, file: SafetensorsFile) -> None:
    if what in found:
        raise UserError(f"{file.path}: {found[what]} and {key} are for the same module; keep one adapter a file")
    found[what] = key


def _hint(strangers: Sequence[str]) -> str:
    joined = " ".join(strangers)
    if "lora_magnitude_vector" in joined:
        return "; they belong to DoRA (use_dora), which is not supported"
    if "lora_embedding_" in joined:
        return "; adapters on embeddings are not supported, train the embedding with modules_to_save"
    if not any(key.startswith(_PREFIX) for key in strangers):
        return f"; names of a PEFT adapter begin with {_PREFIX}"
    return ""


def _some(keys: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
    return f"{', '.join(sorted(keys)[:shown])}{more}"

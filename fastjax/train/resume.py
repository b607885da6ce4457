"""What a resumed run must share with the one it goes on from, and what it may change."""

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from flax import nnx

from fastjax.models.checkpoint.tensors import quantization_of
from fastjax.models.decoder import CausalLM
from fastjax.models.host import to_host
from fastjax.models.layers import Linear, TrainedParam
from fastjax.models.lora import LoraConfig
from fastjax.models.quantized import is_quantized
from fastjax.train.config import OVERRIDABLE, TrainConfig
from fastjax.train.data import TrainingRows

# Settings that change the numbers and that no other part of the fingerprint follows. The number of steps is left out:
# it may change, and `horizon_note` tells what that does to the schedule.
_NUMERICS = (
    "dtype", "method", "seed", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "warmup_ratio", "weight_decay", "max_grad_norm", "optim", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip
_MICRO_BATCH = "per_device_train_batch_size x devices"

# Parts of a fingerprint whose values say nothing to a person.
_CHECKSUMS = {
    "data": "the tokenised rows are others: look at data, max_seq_length, train_on, long_rows, packing, the tokenizer",
    "base_weights": "the base model's weights are others",
}


def fingerprint(
    config: TrainConfig,
    model: CausalLM,
    lora: LoraConfig | None,
    rows: TrainingRows,
    batch_size: int,
    mesh_shape: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """All that a run's numbers follow from but the number of steps, in a form that JSON takes.

    Args:
      batch_size: rows of a micro-batch over all devices: their number may change, if it does not change this.
      mesh_shape: devices by axis. What rounding gradients leaves over belongs to one device each, and so to one mesh.
    """
    adapter = None if lora is None else {"lora_r" if name == "r" else name: v for name, v in asdict(lora).items()}
    # Left out where it is off: so a run that began before there was such a setting goes on.
    compression = {}
    if config.grad_compression != "none":
        where = ",".join(f"{axis}={size}" for axis, size in (mesh_shape or {}).items())
        compression = {"grad_compression": f"{config.grad_compression} on the mesh {where}"}
    return {
        **{name: getattr(config, name) for name in _NUMERICS},
        **compression,
        "dtype": model.dtype.name,
        "model": model.config.to_hf(),
        "base_weights": None if config.method == "full" else _frozen_sample(model),
        "quantization": _quantization(model),
        "adapter": adapter,
        "data": rows.fingerprint,
        _MICRO_BATCH: batch_size,
    }


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "", without: Collection[str] = ()
) -> list[str]:
    """One line for each setting that two fingerprints do not share, nested ones under dotted names.

    Args: without: names of `config.OVERRIDABLE` that are passed over.
    """
    found = []
    saved, now = json.loads(json.dumps(saved)), json.loads(json.dumps(now))
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if old == new or (not prefix and _flag_of(key) in without):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif key in _CHECKSUMS:
            found.append(f"{_CHECKSUMS[key]} (checksum {old} then, {new} now)")
        else:
            found.append(f"{prefix}{key} was {old!r} and is now {new!r}")
    return found


def override_hint(saved: Mapping[str, Any], now: Mapping[str, Any], override: Collection[str]) -> str:
    """How to go on all the same, where every difference is one that may be overridden; else ""."""
    keys = {_flag_of(key): saved.get(key) != now.get(key) for key in saved.keys() | now.keys()}
    names = [name for name in OVERRIDABLE if keys.get(name)]
    if differences(saved, now, without=names):
        return ""
    return f", or allow what differs with --resume_override {','.join(sorted({*override, *names}))}"


def _flag_of(key: str) -> str:
    return "mesh" if key == _MICRO_BATCH else key


def horizon(total_steps: int, warmup_steps: int) -> dict[str, int]:
    """What of a schedule follows from the number of steps; a checkpoint keeps it."""
    return {"total_steps": total_steps, "warmup_steps": warmup_steps}


def horizon_note(kind: str, step: int, saved: dict[str, int], now: dict[str, int]) -> str | None:
    """What to say of a run whose end has moved; None if the rates of the steps done are those of the new schedule.

    Args:
      kind: lr_scheduler_type.
      step: optimiser steps done.
      saved, now: the run's `horizon` then and now.
    """
    same_warmup = saved["warmup_steps"] == now["warmup_steps"]
    exact = same_warmup and (kind.startswith("constant") or step <= now["warmup_steps"])
    if exact or saved == now:
        return None
    then, total = saved["total_steps"], now["total_steps"]
    return (
        f"note: the run was to end at step {then} and now ends at step {total}; the {kind} schedule is computed anew, "
        f"so this is not the run that {total} steps would have been"
    )


def _quantization(model: CausalLM) -> dict[str, Any] | None:
    """Which linear layers are 4-bit and in which form; None if none is."""
    return quantization_of(model).to_hf(model.dtype.name) if is_quantized(model) else None


def _frozen_sample(model: CausalLM) -> int:
    """CRC-32 of a few of the weights that no step changes: enough to tell two base models of one shape apart.

    What is trained is left out: a model that a run has trained in this process must be able to go on.
    """
    linears = [module.weight for _, module in nnx.iter_modules(model.layers) if isinstance(module, Linear)]
    weights = (model.norm.weight, model.embed_tokens.weight, *linears)
    crc = 0
    for weight in weights:
        if isinstance(weight, TrainedParam):
            continue
        for leaf in jax.tree.leaves(weight.get_value()):
            sample = leaf[:, :1] if leaf.ndim == 3 else leaf[:8]
            crc = zlib.crc32(np.ascontiguousarray(np.asarray(to_host(sample), np.float32)).tobytes(), crc)
    return crc

"""What a resumed run must share with the one it goes on from, and what it may change."""

import zlib
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from fastjax.models.decoder import CausalLM
from fastjax.models.layers import TrainedParam
from fastjax.models.lora import LoraConfig
from fastjax.train.config import TrainConfig
from fastjax.train.data import TokenisedDataset

# Settings that change the numbers and that no other part of the fingerprint follows. The number of steps is left out:
# it may change, and `horizon_note` tells what that does to the schedule.
_NUMERICS = (
    "dtype", "method", "seed", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "warmup_ratio", "weight_decay", "max_grad_norm", "optim", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip


def fingerprint(
    config: TrainConfig, model: CausalLM, lora: LoraConfig | None, rows: TokenisedDataset, batch_size: int
) -> dict[str, Any]:
    """All that a run's numbers follow from but the number of steps, in a form that JSON takes.

    Args:
      batch_size: rows of a micro-batch over all devices: their number may change, if it does not change this.
    """
    adapter = None if lora is None else {"lora_r" if name == "r" else name: v for name, v in asdict(lora).items()}
    return {
        **{name: getattr(config, name) for name in _NUMERICS},
        "dtype": model.dtype.name,
        "model": model.config.to_hf(),
        "base_weights": None if config.method == "full" else _frozen_sample(model),
        "adapter": adapter,
        "data": rows.fingerprint,
        "per_device_train_batch_size x devices": batch_size,
    }


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


def _frozen_sample(model: CausalLM) -> int:
    """CRC-32 of a few of the weights that no step changes: enough to tell two base models of one shape apart.

    What is trained is left out: a model that a run has trained in this process must be able to go on.
    """
    weights = (model.norm.weight, model.embed_tokens.weight, model.layers.self_attn.q_proj.weight)
    crc = 0
    for weight in weights:
        if isinstance(weight, TrainedParam):
            continue
        for leaf in jax.tree.leaves(weight.get_value()):
            sample = leaf[:, :1] if leaf.ndim == 3 else leaf[:8]
            crc = zlib.crc32(np.ascontiguousarray(np.asarray(jax.device_get(sample), np.float32)).tobytes(), crc)
    return crc

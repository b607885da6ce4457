"""Twenty optimiser steps beside torch: the same model, adapter, rows and AdamW give the same losses and weights."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file

from fastjax.models.checkpoint.load import load_model
from fastjax.models.lora import split_trainable
from fastjax.models.peft_io import load_adapter, save_adapter
from fastjax.train.mesh import make_mesh, put_batch, replicated
from fastjax.train.optim import make_optimizer
from fastjax.train.schedule import make_schedule
from fastjax.train.step import make_train_step

STEPS, WARMUP, MICRO, ROWS, LENGTH = 20, 3, 2, 2, 14
RATE, DECAY, MAX_NORM = 1e-3, 0.01, 1.0


@pytest.fixture(scope="module")
def batches() -> list[dict[str, np.ndarray]]:
    """A batch a step: rows of 5 to 14 tokens padded on the right, a part of each a target."""
    rng = np.random.default_rng(7)
    out = []
    for _ in range(STEPS):
        shape = (MICRO, ROWS, LENGTH)
        ids = rng.integers(1, 99, shape).astype(np.int32)
        lengths = rng.integers(5, LENGTH + 1, shape[:2])[..., None]
        starts = rng.integers(1, 4, shape[:2])[..., None]
        place = np.arange(LENGTH)
        real = place < lengths
        out.append({
            "input_ids": np.where(real, ids, 0),
            "loss_mask": real & (place >= starts),
            "segment_ids": real.astype(np.int32),
        })  # fmt: skip
    return out


def train_in_torch(model: Any, batches: list[dict[str, np.ndarray]]) -> list[float]:
    """The loss of each step; `model` is trained in place, as transformers.Trainer does it."""
    from transformers.trainer_pt_utils import get_parameter_names

    decays = get_parameter_names(model, [torch.nn.LayerNorm], [r"bias", r"layernorm", r"(?:^|\.)norm(?:$|\.)"])
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decays], "weight_decay": DECAY},
        {"params": [p for name, p in trained if name not in decays], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    scheduler = transformers.get_scheduler("linear", optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS)
    losses = []
    for batch in batches:
        count = int(batch["loss_mask"].sum())
        total = 0.0
        for ids, mask, real in zip(batch["input_ids"], batch["loss_mask"], batch["segment_ids"], strict=True):
            ids = torch.tensor(ids, dtype=torch.long)
            labels = torch.where(torch.tensor(mask), ids, -100)[:, 1:]
            logits = model(input_ids=ids, attention_mask=torch.tensor(real)).logits[:, :-1]
            summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (summed / count).backward()
            total += summed.item() / count
        torch.nn.utils.clip_grad_norm_([p for _, p in trained], MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_here(model: Any, method: str, batches: list[dict[str, np.ndarray]]) -> tuple[list[float], Any]:
    """The loss of each step, and the trained model."""
    mesh = make_mesh()
    graphdef, trainable, frozen = split_trainable(model, method)
    schedule = make_schedule("linear", RATE, warmup_steps=WARMUP, total_steps=STEPS)
    optimizer = make_optimizer(schedule, weight_decay=DECAY, max_grad_norm=MAX_NORM)
    step = make_train_step(graphdef, optimizer, mesh=mesh)
    trainable, frozen, opt_state = jax.device_put((trainable, frozen, optimizer.init(trainable)), replicated(mesh))
    losses = []
    for batch in batches:
        trainable, opt_state, metrics = step(trainable, opt_state, frozen, put_batch(batch, mesh), jax.random.key(0))
        losses.append(float(metrics["loss_sum"]) / int(metrics["num_target_tokens"]))
    assert step._cache_size() == 1
    return losses, nnx.merge(graphdef, trainable, frozen)


ADAPTERS = {
    "all_linear": ({"target_modules": "all-linear", "rank_pattern": {"layers.1.mlp.up_proj": 2}}, {}),
    "head_and_embedding": (
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"], "use_rslora": True},
        {"tie_word_embeddings": True},
    ),
}


def same_steps(base: Any, ours: Any, method: str, settings: dict, batches: list[dict], folder: Path) -> None:
    """Fails unless an adapter of PEFT is trained over `base` in torch as it is over `ours` here."""
    # PEFT's own initial adapter, read from its file: both sides start from the same numbers.
    torch.manual_seed(0)
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings))
    theirs.save_pretrained(folder / "start")
    config = load_adapter(ours, folder / "start")

    our_losses, ours = train_here(ours, method, batches)
    their_losses = train_in_torch(theirs, batches)
    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-4)

    save_adapter(ours, config, folder / "ours")
    theirs.save_pretrained(folder / "theirs")
    start, end, expected = (
        load_file(folder / name / "adapter_model.safetensors") for name in ("start", "ours", "theirs")
    )
    for key in end:
        np.testing.assert_allclose(end[key], expected[key], atol=1e-4, err_msg=key)
        assert (end[key] - start[key]).abs().max() > 1e-3, f"{key} was not trained"


@pytest.mark.parametrize("name", ADAPTERS)
def test_twenty_steps_of_an_adapter_equal_torch_and_peft(name, tiny_hf, from_hf_model, batches, tmp_path):
    settings, changes = ADAPTERS[name]
    base = tiny_hf(**changes)
    same_steps(base, from_hf_model(base), "lora", settings, batches, tmp_path)


def test_twenty_steps_over_4bit_weights_equal_torch_peft_and_bitsandbytes(tiny_hf, quantize_hf, batches, tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 128}
    base = quantize_hf(tiny_hf(**shape), tmp_path / "base", llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"])
    ours = load_model(str(tmp_path / "base"), "float32")
    same_steps(base, ours, "qlora", {"target_modules": "all-linear"}, batches, tmp_path)


def test_twenty_steps_of_full_fine_tuning_equal_torch(tiny_hf, from_hf_model, batches):
    theirs = tiny_hf(tie_word_embeddings=True)
    our_losses, ours = train_here(from_hf_model(theirs), "full", batches)
    their_losses = train_in_torch(theirs, batches)
    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-4)
    pairs = [
        (ours.embed_tokens.weight[...], theirs.model.embed_tokens.weight),
        (ours.norm.weight[...], theirs.model.norm.weight),
        (ours.layers.mlp.down_proj.weight[1], theirs.model.layers[1].mlp.down_proj.weight),
        (ours.layers.input_layernorm.weight[0], theirs.model.layers[0].input_layernorm.weight),
    ]
    for value, parameter in pairs:
        np.testing.assert_allclose(value, parameter.detach().numpy(), atol=1e-4)

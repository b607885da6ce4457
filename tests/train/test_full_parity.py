"""Full fine-tuning against torch: five steps of AdamW with Hugging Face's decay groups, accumulation and clipping."""

import jax
import numpy as np
from flax import nnx

from fastjax.models.lora import split_trainable
from fastjax.train.mesh import make_mesh, put_batch, replicated
from fastjax.train.optim import make_optimizer
from fastjax.train.schedule import make_schedule
from fastjax.train.step import make_train_step

STEPS = 5


def batches():
    """Five steps of two micro-batches of two rows; rows differ in length and in what is a target."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        inside = np.arange(12) < rng.integers(3, 13, (2, 2, 1))
        ids = np.where(inside, rng.integers(1, 99, inside.shape), 0).astype(np.int32)
        yield {
            "input_ids": ids,
            "loss_mask": inside & (np.arange(12) >= 2),
            "segment_ids": inside.astype(np.int32),
        }


def train_with_torch(model):
    """Losses and gradient norms of every step; the model is trained in place."""
    import torch
    from transformers import Trainer, get_scheduler

    decayed = set(Trainer.get_decay_parameter_names(None, model))
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=STEPS)
    log = []
    for batch in batches():
        count = int(batch["loss_mask"][..., 1:].sum())
        total = 0.0
        for ids, mask, inside in zip(batch["input_ids"], batch["loss_mask"], batch["segment_ids"], strict=True):
            labels = torch.tensor(np.where(mask, ids, -100)).long()
            logits = model(torch.tensor(ids).long(), attention_mask=torch.tensor(inside)).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            (loss / count).backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log.append((total / count, float(norm)))
    return log


def test_five_full_steps_equal_torch(tiny_hf, from_hf_model):
    theirs = tiny_hf(seed=1, attention_bias=True, tie_word_embeddings=True)
    model = from_hf_model(theirs)
    graphdef, trainable, frozen = split_trainable(model, "full")
    mesh = make_mesh()
    trainable, frozen, rng = jax.device_put((trainable, frozen, jax.random.key(0)), replicated(mesh))
    schedule = make_schedule("cosine", 1e-3, warmup_steps=1, total_steps=STEPS)
    optimizer = make_optimizer(schedule, weight_decay=0.1, max_grad_norm=0.5)
    step = make_train_step(graphdef, optimizer, mesh=mesh)
    opt_state, log = optimizer.init(trainable), []
    for batch in batches():
        trainable, opt_state, metrics = step(trainable, opt_state, frozen, put_batch(batch, mesh), rng)
        log.append((metrics["loss_sum"] / metrics["num_target_tokens"], metrics["grad_norm"]))
    np.testing.assert_allclose(log, train_with_torch(theirs), rtol=1e-4)
    trained = from_hf_model(theirs)
    expected = jax.tree.leaves(nnx.state(trained, nnx.Param))
    for ours, leaf in zip(jax.tree.leaves(trainable), expected, strict=True):
        np.testing.assert_allclose(ours, leaf, atol=1e-4)

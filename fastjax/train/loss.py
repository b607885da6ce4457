"""The sum of target losses of one micro-batch. The shift by one token happens here and nowhere else."""

from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.linear_cross_entropy import linear_cross_entropy
from fastjax.models.decoder import CausalLM
from fastjax.models.parallel import ALONE, Parallel
from fastjax.models.remat import RematPlan, parse_plan

# In a batch: [A, B, T, D], what the embedding gives for input_ids, where its table is not on the device.
ROWS = "embeddings"
# A stream of its own for the head's dropout; the decoder derives its layers' keys from the same micro-batch key.
_HEAD_STREAM = 0x6EAD
# Tokens of a device that an MLP takes at a time where its activations are not kept: a matmul is as fast as over more,
# and decoding the weights once more for every piece takes a fiftieth of it.
MLP_TOKENS = 8192
# Where memory is so short that a plan keeps values in host memory, half of that, and of the loss's 2048, pays.
MLP_TOKENS_IF_SHORT, _LOSS_TOKENS_IF_SHORT = 4096, 1024


def shifted_targets(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """What each position has to predict, and whether it counts.

    Position t predicts token t + 1 where that token is a target and belongs to the same document; the last position
    predicts nothing. Rolling instead of cutting keeps T, and with it the layout of the hidden states.

    Args:
      batch: input_ids [B, T] int32, loss_mask [B, T] bool (this token is a target), segment_ids [B, T] int32, 0 being
        padding.
    Returns: targets [B, T] int32; counts [B, T] bool.
    """
    ids, mask, segments = batch["input_ids"], batch["loss_mask"], batch["segment_ids"]
    targets = jnp.roll(ids, -1, axis=1)
    counts = jnp.roll(mask, -1, axis=1) & (jnp.roll(segments, -1, axis=1) == segments) & (segments > 0)
    return targets, counts.at[:, -1].set(False)


def head_is_trained(model: CausalLM, trainable: Any) -> bool:
    """Whether the head's own weight (the embedding's, if tied) is among the trainable leaves."""
    owner = "embed_tokens" if model.lm_head is None else "lm_head"
    return owner in trainable and "weight" in trainable[owner]


def loss_sum(
    model: CausalLM,
    batch: dict[str, jax.Array],
    *,
    parallel: Parallel = ALONE,
    train_head: bool = False,
    dropout_rng: jax.Array | None = None,
    remat: str | RematPlan = "none",
) -> tuple[jax.Array, jax.Array]:
    """Summed cross-entropy over the targets of a micro-batch, and their number.

    Full logits never exist: the head's matmul lives inside the chunked loss.

    Args:
      batch: see `shifted_targets`; positions [B, T] int32, where rows hold several documents; ROWS, where the
        embedding's table is in host memory.
      parallel: inside `jax.shard_map`, this device's part; the sum is then over its own rows, and the gradients are
        its own parts.
      train_head: whether the head's weight gets a gradient.
      dropout_rng: key of this micro-batch; None means no dropout.
      remat: see `CausalLM.hidden_states`.
    Returns: float32 scalar, int32 scalar.
    """
    plan = parse_plan(remat) if isinstance(remat, str) else remat
    hidden = model.hidden_states(
        batch["input_ids"],
        positions=batch.get("positions"),
        segment_ids=batch["segment_ids"],
        dropout_rng=dropout_rng,
        remat=plan,
        # Only packed rows bring positions: in the others one document lies before its padding.
        packed="positions" in batch,
        mlp_tokens=MLP_TOKENS_IF_SHORT if plan.offloads else MLP_TOKENS,
        parallel=parallel,
        embeddings=batch.get(ROWS),
    )
    if parallel.vocab_axis is not None:
        hidden = parallel.enter(hidden)
    weight = model.head_weight(parallel)
    lora = None if model.lm_head is None else model.lm_head.lora
    if lora is not None:
        # W h + B p is one product of joined matrices: [W, B] [h, p], so the adapter needs no logits of its own.
        key = None
        if dropout_rng is not None:
            key = parallel.dropout_key(jax.random.fold_in(dropout_rng, _HEAD_STREAM), hidden.shape[0])
        projected = lora.project(hidden, key)
        hidden = jnp.concatenate([hidden, projected], axis=-1)
        weight = jnp.concatenate([weight.astype(hidden.dtype), lora.lora_b[...].astype(hidden.dtype)], axis=-1)
    targets, counts = shifted_targets(batch)
    num_tokens = targets.size
    total = linear_cross_entropy(
        hidden.reshape(num_tokens, hidden.shape[-1]),
        weight,
        targets.reshape(num_tokens),
        counts.reshape(num_tokens).astype(jnp.float32),
        train_weight=train_head or lora is not None,
        chunk_size=_LOSS_TOKENS_IF_SHORT if plan.offloads and num_tokens > 4 * _LOSS_TOKENS_IF_SHORT else None,
        vocab_axis=parallel.vocab_axis,
    )
    return total, jnp.sum(counts, dtype=jnp.int32)

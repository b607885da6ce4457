"""Packed rows give the loss and the gradients of the same documents alone, and no document sees another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import LoraParam
from fastjax.models.lora import LoraConfig, apply_lora
from fastjax.train.data import DataReport, PackedRows, TokenisedDataset, eval_batches
from fastjax.train.data.tokenise import TokenRow
from fastjax.train.loss import loss_sum

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "mistral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0
        },
        "max_position_embeddings": 64,
    }
)  # fmt: skip


def documents(changed=None):
    rng = np.random.default_rng(0)
    rows = [TokenRow(rng.integers(1, 61, n, dtype=np.int32), np.arange(n) > n // 3) for n in (13, 5, 22, 9, 1, 17, 2)]
    if changed is not None:
        ids = (rows[changed].input_ids + 7) % 60 + 1
        rows[changed] = TokenRow(ids.astype(np.int32), rows[changed].loss_mask)
    return TokenisedDataset(rows, DataReport("made"))


@pytest.fixture(scope="module")
def model():
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"])
    made = apply_lora(CausalLM(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32), lora, jax.random.key(0))
    graphdef, trainable, frozen = nnx.split(made, LoraParam, ...)
    trainable = jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(1), leaf.shape), trainable)
    return graphdef, trainable, frozen


def loss_and_gradient(model, rows):
    """The mean over all targets, and its gradient, of batches of [1, 1, T] rows."""
    graphdef, trainable, frozen = model

    @jax.jit
    def one(trainable, batch):
        def loss(trainable):
            return loss_sum(nnx.merge(graphdef, trainable, frozen), jax.tree.map(lambda x: x[0], batch))

        (total, count), gradient = jax.value_and_grad(loss, has_aux=True)(trainable)
        return total, count, gradient

    total, count, gradient = 0.0, 0, None
    with eval_batches(rows, 1, widths=[64]) as batches:
        for batch in batches:
            value, targets, grad = one(trainable, batch)
            total, count = total + float(value), count + int(targets)
            gradient = grad if gradient is None else jax.tree.map(jnp.add, gradient, grad)
    return total / count, count, jax.tree.map(lambda leaf: np.asarray(leaf) / count, gradient)


def test_packed_loss_and_gradients_equal_those_of_the_documents_alone(model):
    rows = documents()
    packed = PackedRows(rows, 64, seed=2)
    assert len(packed) == 2
    loss, count, gradient = loss_and_gradient(model, rows)
    packed_loss, packed_count, packed_gradient = loss_and_gradient(model, packed)
    assert packed_count == count == sum(int(row.loss_mask[1:].sum()) for row in rows)
    assert packed_loss == pytest.approx(loss, abs=1e-5)
    for ours, theirs in zip(jax.tree.leaves(packed_gradient), jax.tree.leaves(gradient), strict=True):
        assert np.abs(theirs).max() > 1e-4
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_changed_document_changes_no_other_documents_loss(model):
    graphdef, trainable, frozen = model
    made = nnx.merge(graphdef, trainable, frozen)
    rows = {name: PackedRows(documents(changed), 64, seed=None) for name, changed in (("old", None), ("new", 0))}
    hidden = {}
    for name, packed in rows.items():
        with eval_batches(packed, 1, widths=[64]) as batches:
            batch = jax.tree.map(lambda x: x[0], next(batches))
        hidden[name] = np.asarray(
            made.hidden_states(batch["input_ids"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        )[0]
        segments = batch["segment_ids"][0]
    assert segments.max() >= 3
    assert np.abs(hidden["old"][segments == 1] - hidden["new"][segments == 1]).max() > 1e-3
    others = segments > 1
    np.testing.assert_array_equal(hidden["old"][others], hidden["new"][others])

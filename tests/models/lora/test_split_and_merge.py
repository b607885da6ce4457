"""What is trained, what stays frozen, and the arithmetic of a merge."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.layers import Lora
from fastjax.models.lora import LoraConfig, apply_lora, split_trainable
from fastjax.models.merge import merge_lora


def leaves(state):
    return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(state)}


@pytest.fixture(scope="module")
def tied(tiny_hf, from_hf_model):
    """model(dtype): a tiny tied CausalLM with arrays of its own, since a merge uses them up."""
    hf_model = tiny_hf(tie_word_embeddings=True)
    bases = {dtype: nnx.split(from_hf_model(hf_model, dtype=dtype)) for dtype in ("float32", "bfloat16")}

    def build(dtype="float32"):
        graphdef, state = bases[dtype]
        return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))

    return build


def adapted(model, **settings):
    """The model with an adapter that is not zero."""
    apply_lora(model, LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **settings), jax.random.key(0))
    return model


def test_dropout_zeroes_inputs_of_the_adapter_at_its_rate_and_scales_the_rest():
    lora = Lora(jnp.eye(64), jnp.eye(64), jnp.float32(3.0), dropout=0.25)
    x = jnp.ones((100, 64))
    dropped = np.asarray(lora(x, jax.random.key(0)))
    assert set(np.unique(dropped)) == {0.0, np.float32(4.0)}
    assert abs(np.mean(dropped == 0) - 0.25) < 0.02
    assert (dropped != np.asarray(lora(x, jax.random.key(1)))).any()
    np.testing.assert_array_equal(lora(x, None), 3 * x)


def test_lora_trains_adapters_and_saved_modules_only(tied):
    model = adapted(tied("bfloat16"), target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    graphdef, trainable, frozen = split_trainable(model, "lora")
    trained = leaves(trainable)
    assert set(trained) == {
        "embed_tokens.weight", "layers.self_attn.q_proj.lora.lora_a", "layers.self_attn.q_proj.lora.lora_b"
    }  # fmt: skip
    assert {leaf.dtype for leaf in trained.values()} == {jnp.dtype("float32")}
    kept = leaves(frozen)
    assert "layers.self_attn.q_proj.lora.scale" in kept and "lm_head.weight" in kept
    assert kept["layers.self_attn.q_proj.weight"].dtype == jnp.bfloat16
    ids = jnp.arange(5)[None]
    np.testing.assert_array_equal(nnx.merge(graphdef, trainable, frozen)(ids), model(ids))
    assert model.hidden_states(ids).dtype == jnp.bfloat16


def test_trained_copies_survive_that_the_base_or_they_are_donated(tied):
    model = adapted(tied(), target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    _, trainable, frozen = split_trainable(model, "lora")
    jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)(trainable)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(frozen))


def test_head_adapter_of_a_tied_model_holds_the_embedding_once(tied):
    model = adapted(tied(), target_modules=["lm_head"])
    _, _, frozen = split_trainable(model, "lora")
    assert "embed_tokens.weight" in leaves(frozen) and "lm_head.weight" not in leaves(frozen)


def test_full_trains_every_weight_in_float32_and_computes_in_the_models_dtype(tied):
    model = tied("bfloat16")
    _, trainable, frozen = split_trainable(model, "full")
    assert not jax.tree.leaves(frozen)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainable)} == {jnp.dtype("float32")}
    assert "layers.input_layernorm.weight" in leaves(trainable)
    ids = jnp.arange(5)[None]
    assert model.hidden_states(ids).dtype == jnp.bfloat16
    np.testing.assert_array_equal(model(ids), tied("bfloat16")(ids))


def test_split_that_makes_no_sense_is_refused(tied):
    with pytest.raises(UserError, match="'lora' on a model without adapters"):
        split_trainable(tied(), "lora")
    with pytest.raises(UserError, match="'full' trains every weight, and this model has adapters"):
        split_trainable(adapted(tied(), target_modules=["q_proj"]), "full")
    with pytest.raises(UserError, match="method='dora' is not known; choose one of qlora, lora, full"):
        split_trainable(tied(), "dora")


def test_merge_sums_in_float32_and_rounds_once(tied):
    model = adapted(tied("bfloat16"), target_modules=["up_proj"], layers_to_transform=[1])
    linear = model.layers.mlp.up_proj
    weight = np.asarray(linear.weight[...]).astype(np.float64)
    a, b = (np.asarray(x[...], np.float64) for x in (linear.lora.lora_a, linear.lora.lora_b))
    delta = 5 / 3 * b @ a
    merged = np.asarray(merge_lora(model).layers.mlp.up_proj.weight[...])
    once = (weight + delta).astype(ml_dtypes.bfloat16)
    twice = weight.astype(ml_dtypes.bfloat16) + delta.astype(ml_dtypes.bfloat16)
    assert merged.dtype == ml_dtypes.bfloat16
    # float32 may fall on the other side of a tie of float64, once in a few thousand; a second rounding shows far more.
    assert np.mean(merged != once) < 0.002 < 0.02 < np.mean(twice != once)
    np.testing.assert_array_equal(merged[0].astype(np.float64), weight[0])


def test_merge_is_in_place_unless_the_model_is_kept(tied):
    model = adapted(tied(), target_modules=["q_proj", "up_proj"])
    before, ids = model.layers.mlp.up_proj.weight[...], jnp.arange(5)[None]
    logits = model(ids)
    kept = merge_lora(model, keep=True)
    assert kept is not model and not before.is_deleted()
    np.testing.assert_array_equal(model(ids), logits)
    merged = merge_lora(model)
    assert merged is model and before.is_deleted()
    assert merged.layers.mlp.up_proj.lora is None and merged.lm_head is None
    jax.tree.map(np.testing.assert_array_equal, nnx.state(merged), nnx.state(kept))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merge_gives_every_weight_the_asked_dtype(tied, dtype):
    model = adapted(tied("float32"), target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"])
    merged = merge_lora(model, dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(merged))} == {jnp.dtype(dtype)}
    assert not merged.config.tie_word_embeddings and merged.config.to_hf()["tie_word_embeddings"] is False
    split_trainable(merged, "full")  # a plain model again

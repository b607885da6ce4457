"""Which modules a LoraConfig chooses, and what it refuses. PEFT's own choice is compared in test_peft_parity."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, adapted_modules, apply_lora, has_adapter
from fastjax.models.lora_config import plan_adapter


def make_model(**changes):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    return CausalLM(ModelConfig.from_hf({"model_type": "llama", **sizes, **changes}), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.mark.parametrize(
    ("settings", "num_modules"),
    [
        ({"target_modules": "all-linear"}, 14),
        ({"target_modules": r".*\.0\..*(q|v)_proj"}, 2),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, 1),
        ({"target_modules": ["q_proj", "lm_head"], "layers_to_transform": 1, "layers_pattern": "layers"}, 2),
        ({"target_modules": "all-linear", "exclude_modules": r".*mlp.*"}, 8),
        ({"target_modules": "all-linear", "modules_to_save": ["lm_head"]}, 14),
    ],
)
def test_targets_choose_as_many_modules_as_in_peft(model, tiny_hf, settings, num_modules):
    plan = plan_adapter(LoraConfig(r=2, **settings), model)
    theirs = peft.get_peft_model(tiny_hf(), peft.LoraConfig(r=2, **settings)).base_model.targeted_module_names
    assert {target.name for target in plan.targets} == set(theirs)
    assert len(theirs) == num_modules


def test_all_linear_has_no_adapter_on_the_head_and_28_tensors(model):
    plan = plan_adapter(LoraConfig(r=2), model)
    assert "lm_head" not in {target.name for target in plan.targets}
    holder = nnx.clone(model)
    apply_lora(holder, LoraConfig(r=2), jax.random.key(0))
    assert len(adapted_modules(holder)) * 2 == 28


def test_first_matching_pattern_sets_rank_and_alpha(model):
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], use_rslora=True,
        rank_pattern={r"layers\.0\.self_attn\.q_proj": 9, "q_proj": 16}, alpha_pattern={"up_proj": 2.0},
    )  # fmt: skip
    found = {target.name: (target.rank, target.scale) for target in plan_adapter(config, model).targets}
    assert found == {
        "model.layers.0.self_attn.q_proj": (9, 8 / 3),
        "model.layers.1.self_attn.q_proj": (16, 2.0),
        "model.layers.0.mlp.up_proj": (4, 1.0),
        "model.layers.1.mlp.up_proj": (4, 1.0),
    }


def test_initial_adapter_is_zero_in_b_and_in_the_padding_and_changes_nothing():
    model = make_model()
    ids = jnp.arange(6)[None]
    before = model(ids)
    config = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], rank_pattern={"layers.1.self_attn.q_proj": 5})
    apply_lora(model, config, jax.random.key(1))
    lora = model.layers.self_attn.q_proj.lora
    assert lora.lora_a.shape == (2, 5, 32) and lora.lora_b.shape == (2, 32, 5)
    assert lora.lora_a.dtype == lora.lora_b.dtype == jnp.float32
    values = np.asarray(lora.lora_a[...])
    assert not values[0, 3:].any() and not np.asarray(lora.lora_b[...]).any()
    drawn = np.concatenate([values[0, :3].ravel(), values[1].ravel()])
    # torch: kaiming_uniform(a=sqrt(5)) over 32 inputs is uniform within 1 / sqrt(32), deviation 1 / sqrt(96).
    assert np.abs(drawn).max() <= 32**-0.5 and abs(drawn.std() - 96**-0.5) < 0.01
    np.testing.assert_array_equal(model(ids), before)


def test_initial_values_depend_on_the_key_and_not_on_the_other_targets():
    def query_a(seed, targets):
        model = apply_lora(make_model(), LoraConfig(r=2, target_modules=targets), jax.random.key(seed))
        return np.asarray(model.layers.self_attn.q_proj.lora.lora_a[...])

    np.testing.assert_array_equal(query_a(0, ["q_proj"]), query_a(0, ["q_proj", "o_proj"]))
    assert (query_a(0, ["q_proj"]) != query_a(1, ["q_proj"])).all()


@pytest.mark.parametrize(("how", "b_is_zero"), [("gaussian", True), (False, False)])
def test_other_initialisations(how, b_is_zero):
    config = LoraConfig(r=8, target_modules=["up_proj"], init_lora_weights=how)
    lora = apply_lora(make_model(), config, jax.random.key(0)).layers.mlp.up_proj.lora
    b = np.asarray(lora.lora_b[...])
    assert (not b.any()) == b_is_zero
    if b_is_zero:
        assert abs(np.asarray(lora.lora_a[...]).std() * 8 - 1) < 0.15
    else:
        assert 0.9 * 8**-0.5 < np.abs(b).max() <= 8**-0.5


def test_adapters_can_be_added_to_an_abstract_model():
    def build():
        model = make_model(tie_word_embeddings=True)
        config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"])
        return apply_lora(model, config, jax.random.key(0))

    abstract, real = nnx.eval_shape(build), build()
    shapes = lambda m: jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(m))  # noqa: E731
    assert shapes(abstract) == shapes(real)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["query"]}, "'query' matches no module; the linear modules are .*N.*q_proj.*lm_head"),
        ({"target_modules": ["q_proj", "qproj"]}, "'qproj' matches no module; the linear"),
        ({"target_modules": "q_proj"}, r"'q_proj' matches no module \(a string is a regular expression.*\['q_proj'\]"),
        ({"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]}, "'lm_head' .* take it away"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens, which is an embedding.*modules_to_save=embed_tokens"),
        ({"target_modules": ["q_proj", "norm"]}, "model.norm, which is a norm.*Leave it out"),
        ({"target_modules": r".*self_attn.*"}, "layers.0.self_attn, which is not a linear layer"),
        ({"target_modules": r".*\.mlp\..*"}, "layers.0.mlp.act_fn, which is not a linear layer"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [2]}, "'q_proj' matches no module: .*take it away"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 7]}, "has 7; the model's layers are 0 to 1"),
        ({"rank_pattern": {"qproj": 2}}, "rank_pattern: 'qproj' matches none"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"up_proj": 2}}, "alpha_pattern: 'up_proj' matches none"),
        ({"modules_to_save": ["norm"]}, "'norm' matches model.*norm; embed_tokens and lm_head can"),
        ({"modules_to_save": ["score"]}, "'score' matches no module"),
    ],
)  # fmt: skip
def test_config_that_does_not_fit_the_model_is_refused_and_leaves_it_alone(model, settings, message):
    with pytest.raises(UserError, match=message):
        apply_lora(model, LoraConfig(r=2, **settings), jax.random.key(0))
    assert not has_adapter(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "r=0 must be a whole number"),
        ({"rank_pattern": {"q_proj": 2.5}}, "q_proj.*=2.5 must be a whole number"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan must be a finite number"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0 must be at least 0 and below 1"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "go with a list of target_modules"),
        ({"target_modules": ["q_proj"], "layers_pattern": "h"}, "needs layers_to_transform"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": "(q_proj"}, "not a regular expression"),
        ({"target_modules": [3]}, r"target_modules=\[3\] must hold names only"),
        ({"modules_to_save": "lm_head"}, "must be a list of names"),
    ],
)
def test_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        LoraConfig(**settings)


def test_tied_head_with_ensure_weight_tying_is_refused():
    config = LoraConfig(target_modules=["lm_head"], ensure_weight_tying=True)
    with pytest.raises(UserError, match="would adapt the embedding too"):
        apply_lora(make_model(tie_word_embeddings=True), config, jax.random.key(0))


def test_second_adapter_is_refused():
    model = apply_lora(make_model(), LoraConfig(r=2), jax.random.key(0))
    with pytest.raises(UserError, match="already has adapters"):
        apply_lora(model, LoraConfig(r=2), jax.random.key(0))

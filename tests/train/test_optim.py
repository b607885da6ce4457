"""AdamW, clipping and decay groups against torch and transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fastjax.errors import UserError
from fastjax.train.optim import decay_mask, make_optimizer, step_count
from fastjax.train.schedule import make_schedule


@pytest.mark.parametrize("max_grad_norm", [0.7, 0.0])
def test_several_steps_equal_torch_adamw(max_grad_norm):
    import torch

    rng = np.random.default_rng(0)
    start = {
        "lora_a": rng.normal(size=(3, 5)).astype(np.float32),
        "lora_b": rng.normal(size=(4, 3)).astype(np.float32),
        "norm": {"weight": rng.normal(size=4).astype(np.float32)},
    }
    gradients = [jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), start) for _ in range(6)]
    schedule = make_schedule("linear", 1e-3, warmup_steps=2, total_steps=6)
    optimizer = make_optimizer(schedule, weight_decay=0.1, max_grad_norm=max_grad_norm)

    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = start, optimizer.init(start)
    tensors = [torch.nn.Parameter(torch.tensor(p)) for p in jax.tree.leaves(start)]
    groups = [{"params": tensors[:2], "weight_decay": 0.1}, {"params": tensors[2:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-3)
    for step, grads in enumerate(gradients):
        params, state = update(params, state, grads)
        for tensor, grad in zip(tensors, jax.tree.leaves(grads), strict=True):
            tensor.grad = torch.tensor(grad)
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(tensors, max_grad_norm)
        for group in reference.param_groups:
            group["lr"] = schedule(step)
        reference.step()
    assert int(step_count(state)) == 6
    for ours, theirs in zip(jax.tree.leaves(params), tensors, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-6)


def test_decay_groups_are_those_of_the_hugging_face_trainer():
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        attention_bias=True,
    )
    with torch.device("meta"):
        base = LlamaForCausalLM(config)
        names = [name for name, _ in base.named_parameters()]
        decayed = set(Trainer.get_decay_parameter_names(None, base))
        adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", bias="none"))
        adapters = [name for name, p in adapted.named_parameters() if p.requires_grad]
        assert set(adapters) <= set(Trainer.get_decay_parameter_names(None, adapted))
    for name in names:
        tree = jnp.zeros(1)
        for part in reversed(name.removeprefix("model.").split(".")):
            tree = {part: tree}
        assert jax.tree.leaves(decay_mask(tree)) == [name in decayed], name
    ours = {"q_proj": {"lora": {"lora_a": 0, "lora_b": 0}}, "embed_tokens": {"weight": 0}}
    assert jax.tree.leaves(decay_mask(ours)) == [True] * 3


def test_moments_are_float32_and_a_small_step_moves_float32_leaves_only_as_far_as_they_can():
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "lora_b": jnp.ones(3)}
    optimizer = make_optimizer(make_schedule("constant", 1e-5, warmup_steps=0, total_steps=1))
    state = optimizer.init(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    after = optax.apply_updates(params, updates)
    assert after["w"].dtype == jnp.bfloat16
    assert np.all(np.asarray(after["lora_b"]) < 1.0)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"optim": "sgd"}, "optim='sgd' is not known; known: adamw, adamw_8bit, adamw_bf16"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"adam_beta2": 1.0}, "adam_beta2=1.0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(UserError, match=words):
        make_optimizer(lambda step: 1e-3, **settings)


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0}, {"max_grad_norm": None}, {"weight_decay": 0.0}])
def test_what_is_turned_off_does_not_move_the_leaves_of_the_state(settings):
    def names(**settings):
        state = make_optimizer(lambda step: 0.1, **settings).init({"a": jnp.ones(2)})
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]

    common = {"max_grad_norm": 1.0, "weight_decay": 0.1}
    assert names(**{**common, **settings}) == names(**common)

"""Adapters against PEFT on torch: logits, gradients, files in both directions, merging."""

import copy
import json
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file

from fastjax.models.checkpoint.save import save_model
from fastjax.models.lora import adapted_modules, split_trainable
from fastjax.models.merge import merge_lora
from fastjax.models.peft_io import load_adapter, save_adapter

MLP = ["gate_proj", "up_proj", "down_proj"]
TIED = {"tie_word_embeddings": True}

# name: (LoRA settings, changes of the base's config, number of adapted modules)
CASES: dict[str, tuple[dict, dict, int]] = {
    "all_linear": ({"target_modules": "all-linear"}, {}, 14),
    "all_linear_biases": ({"target_modules": "All-Linear"}, {"attention_bias": True, "mlp_bias": True, **TIED}, 14),
    "rslora": ({"target_modules": ["q_proj", "v_proj"], "use_rslora": True}, {}, 4),
    "regex": ({"target_modules": r".*\.0\..*(q|v)_proj"}, {}, 2),
    "one_layer": ({"target_modules": ["self_attn.q_proj"], "layers_to_transform": [1]}, {}, 1),
    "ranks_and_alphas": (
        {
            "target_modules": [*MLP, "q_proj"],
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.(up|down)_proj": 7},
            "alpha_pattern": {"model.layers.0.mlp.gate_proj": 11, "up_proj": 3},
        },
        {},
        8,
    ),
    "full_names": ({"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj"]}, {}, 2),
    "exclude": ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.v_proj"]}, {}, 3),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, {}, 3),
    "head_tied": ({"target_modules": ["q_proj", "lm_head"]}, TIED, 3),
    "save_both": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, {}, 2),
    "save_both_tied": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, TIED, 2),
    "save_embedding_tied": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, TIED, 2),
    "save_head_tied": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, TIED, 2),
    "save_stays_tied": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        TIED,
        2,
    ),
    "save_embedding_adapt_head_tied": (
        {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
        TIED,
        1,
    ),
}  # fmt: skip


class Case(NamedTuple):
    base: Any  # the transformers model without adapter
    theirs: Any  # the PeftModel
    ours: Any  # the CausalLM with the adapter as load_adapter left it
    config: Any  # what load_adapter returned
    num_modules: int


@pytest.fixture(scope="module", params=CASES)
def case(request, tiny_hf, from_hf_model, peft_adapter, tmp_path_factory) -> Case:
    settings, changes, num_modules = CASES[request.param]
    base = tiny_hf(**changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft_adapter(copy.deepcopy(base), **settings)
        folder = tmp_path_factory.mktemp("peft")
        theirs.save_pretrained(folder)
    ours = from_hf_model(base)
    return Case(base, theirs, ours, load_adapter(ours, folder), num_modules)


# Code that runs once is not worth optimising: half of the compile time.
fast_compile = {"compiler_options": {"xla_backend_optimization_level": 0}, "static_argnums": 0}


@partial(jax.jit, **fast_compile)
def logits_of(graphdef: Any, state: Any, ids: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)(ids)


@partial(jax.jit, **fast_compile)
def loss_gradients_logits(graphdef: Any, trainable: Any, frozen: Any, ids: jax.Array) -> Any:
    def loss(trainable):
        logits = nnx.merge(graphdef, trainable, frozen)(ids)
        losses = (
            jax.nn.logsumexp(logits[:, :-1], -1) - jnp.take_along_axis(logits[:, :-1], ids[:, 1:, None], -1)[..., 0]
        )
        return jnp.mean(losses), logits

    (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
    return value, gradients, logits


def torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.numpy()


def reload_in_peft(monkeypatch: pytest.MonkeyPatch, base: Any, folder: Any) -> Any:
    """The PeftModel of a folder, after checking that PEFT found every key and knew every key."""
    results = []
    load = peft.peft_model.set_peft_model_state_dict
    keep = lambda *args, **kwargs: results.append(load(*args, **kwargs)) or results[-1]  # noqa: E731
    monkeypatch.setattr(peft.peft_model, "set_peft_model_state_dict", keep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
    assert not [w for w in caught if "missing" in str(w.message) or "unexpected" in str(w.message)]
    (result,) = results
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora_" in key or "modules_to_save" in key]
    return model


def test_adapter_of_peft_gives_its_logits_and_gradients(case, ids, tmp_path):
    assert len(adapted_modules(case.ours)) == case.num_modules
    assert set(adapted_modules(case.ours)) == set(case.theirs.base_model.targeted_module_names)
    loss, gradients, logits = loss_gradients_logits(*split_trainable(case.ours, "lora"), jnp.asarray(ids))
    np.testing.assert_allclose(logits, torch_logits(case.theirs, ids), atol=1e-5)

    labels = torch.tensor(ids, dtype=torch.long)
    case.theirs.zero_grad()
    their_loss = case.theirs(labels, labels=labels).loss
    their_loss.backward()
    np.testing.assert_allclose(loss, their_loss.item(), rtol=1e-5)
    # Gradients in the place of the weights, written as an adapter: PEFT's names for them, one layer each.
    holder = nnx.clone(case.ours)
    nnx.update(holder, gradients)
    save_adapter(holder, case.config, tmp_path)
    ours = load_file(tmp_path / "adapter_model.safetensors")
    theirs = {
        name.replace(".modules_to_save", "").replace(".default", ""): parameter.grad
        for name, parameter in case.theirs.named_parameters()
        if parameter.requires_grad
    }
    if case.config.ensure_weight_tying:  # one tensor in torch, written under both names
        ours.pop("base_model.model.lm_head.weight")
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        assert (ours[name] - gradient).abs().max().item() <= 1e-4 * scale, name


def test_saved_adapter_loads_in_peft_with_no_missing_or_unexpected_key(case, ids, tmp_path, monkeypatch):
    save_adapter(case.ours, case.config, tmp_path, "some/base")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(written) <= set(peft.LoraConfig().to_dict())
    assert written["base_model_name_or_path"] == "some/base"
    again = reload_in_peft(monkeypatch, case.base, tmp_path)
    assert set(again.base_model.targeted_module_names) == set(case.theirs.base_model.targeted_module_names)
    np.testing.assert_array_equal(torch_logits(again, ids), torch_logits(case.theirs, ids))


def test_merged_model_equals_pefts_and_computes_the_adapted_logits(case, ids, tmp_path):
    adapted = torch_logits(case.theirs, ids)
    merged = merge_lora(case.ours, keep=True)
    np.testing.assert_allclose(logits_of(*nnx.split(merged), jnp.asarray(ids)), adapted, atol=1e-5)
    tied_before = case.base.config.tie_word_embeddings
    on_tied_pair = {"lm_head", "embed_tokens"} & {*case.config.target_modules, *(case.config.modules_to_save or ())}
    stays_tied = tied_before and (case.config.ensure_weight_tying or not on_tied_pair)
    assert merged.config.tie_word_embeddings == stays_tied
    assert (merged.lm_head is None) == stays_tied
    if "embed_tokens" not in (case.config.modules_to_save or ()):
        np.testing.assert_array_equal(merged.embed_tokens.weight[...], case.base.model.embed_tokens.weight.detach())
    if tied_before:
        save_model(merged, tmp_path / "merged")
        reloaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
        np.testing.assert_allclose(torch_logits(reloaded, ids), adapted, atol=1e-5)
        embedding = reloaded.get_input_embeddings().weight.detach()
        np.testing.assert_array_equal(embedding, merged.embed_tokens.weight[...])
    if tied_before and "lm_head" in case.config.target_modules:
        return  # PEFT adds the head's update to the embedding as well, which the check above forbids
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = copy.deepcopy(case.theirs).merge_and_unload().state_dict()
    state = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.state(merged, nnx.Param))}
    for name, tensor in theirs.items():
        *path, leaf = name.removeprefix("model.").split(".")
        layer = (int(path.pop(1)),) if path[0] == "layers" else ()
        if name == "lm_head.weight" and stays_tied:
            continue
        value = np.asarray(state[".".join([*path, leaf])][...])[layer]
        np.testing.assert_allclose(value, tensor.numpy(), atol=1e-6, err_msg=name)

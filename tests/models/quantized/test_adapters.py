"""Adapters over 4-bit weights: the gradients of the decoded twin, PEFT's logits, merging with one rounding."""

import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
from flax import nnx
from safetensors.torch import load_file

from fastjax.errors import UserError
from fastjax.models.base_form import BaseForm, read_base_form
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.save import save_model
from fastjax.models.layers import LoraParam
from fastjax.models.lora import LoraConfig, apply_lora, split_trainable
from fastjax.models.merge import merge_lora
from fastjax.models.peft_io import save_adapter
from fastjax.models.quant_config import QuantConfig
from fastjax.models.quantized import is_quantized


@partial(jax.jit, static_argnums=(0, 1))
def gradients(graphdef: Any, remat: str, trainable: Any, frozen: Any, ids: jax.Array, rng: Any) -> Any:
    def loss(trainable):
        model = nnx.merge(graphdef, trainable, frozen)
        # Where nothing is dropped and the plan computes an MLP again, it runs in pieces of 3 tokens of each row.
        hidden = model.hidden_states(ids, remat=remat, dropout_rng=rng, mlp_tokens=3 * len(ids))
        logits = model.logits(hidden)[:, :-1]
        chosen = jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    return jax.value_and_grad(loss)(trainable)


def adapted(model: Any, **settings: Any) -> Any:
    """The model with an adapter whose B is not zero."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, **settings})
    return apply_lora(model, config, jax.random.key(1))


@pytest.mark.parametrize(
    ("name", "remat", "settings"),
    [
        (
            "head",
            "full",
            {"target_modules": ".*(_proj|head)", "rank_pattern": {"layers.1.mlp.up_proj": 2}, "lora_dropout": 0.3},
        ),
        ("skipped", "full", {"layers_to_transform": [0, 2], "target_modules": ["q_proj", "up_proj", "down_proj"]}),
        ("fp4", "unrolled,1*none,no_matmul", {"target_modules": ["k_proj", "gate_proj"], "lora_dropout": 0.3}),
    ],
)
def test_gradients_are_those_over_the_decoded_weights(name, remat, settings, case, from_hf_model, ids):
    made = case(name)
    rng = jax.random.key(5) if "lora_dropout" in settings else None
    results = []
    for model, plan in ((load_model(str(made.folder), "float32"), remat), (from_hf_model(made.twin), "none")):
        parts = split_trainable(adapted(model, **settings), "qlora" if is_quantized(model) else "lora")
        results.append(gradients(parts[0], plan, *parts[1:], ids, rng))
    (loss, ours), (expected_loss, expected) = results
    np.testing.assert_allclose(loss, expected_loss, atol=1e-5)
    for (path, gradient), (_, wanted) in zip(nnx.to_flat_state(ours), nnx.to_flat_state(expected), strict=True):
        assert np.isfinite(wanted[...]).all() and np.abs(wanted[...]).max() > 1e-5, path
        np.testing.assert_allclose(gradient[...], wanted[...], atol=1e-5, rtol=1e-4, err_msg=str(path))


def test_4bit_weights_get_no_gradient_and_cannot_be_trained_in_full(case):
    model = adapted(load_model(str(case("skipped").folder), "float32"), modules_to_save=["lm_head"])
    _, trainable, _ = split_trainable(model, "qlora")
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(trainable)}
    assert all("lora_" in path or path == "lm_head.weight" for path in paths)
    with pytest.raises(UserError, match="4-bit weights cannot be trained"):
        split_trainable(load_model(str(case("skipped").folder), "float32"), "full")


def test_a_head_in_4bit_is_not_trained_in_full_beside_adapters(case):
    model = load_model(str(case("head").folder), "float32")
    with pytest.raises(UserError, match="modules_to_save: lm_head is 4-bit"):
        adapted(model, target_modules=["q_proj"], modules_to_save=["lm_head"])


def test_peft_has_the_same_logits_over_the_4bit_model(case, ids, logits, tmp_path):
    made = case("nested")
    model = load_model(str(made.folder), "float32")
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, rank_pattern={"layers.0.mlp.down_proj": 2})
    save_adapter(apply_lora(model, config, jax.random.key(1)), config, tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(made.theirs), tmp_path).train()
    ours = logits(model, ids)
    np.testing.assert_allclose(ours, logits(theirs, ids), atol=1e-4, rtol=0)
    assert np.abs(ours - logits(made.theirs, ids)).max() > 0.1
    assert len([name for name, _ in theirs.named_parameters() if "lora_" in name]) == 28
    assert read_base_form(tmp_path) == BaseForm(QuantConfig("nf4", True, ("lm_head",)), "float32")


def test_an_adapter_over_16bit_weights_says_so(case, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"])
    model = apply_lora(load_model(str(case("nested").source), "float32"), config, jax.random.key(1))
    save_adapter(model, config, tmp_path)
    assert read_base_form(tmp_path) == BaseForm(None, None)


@pytest.mark.parametrize(("name", "dtype"), [("skipped", "bfloat16"), ("head", "float32")])
def test_a_merged_weight_is_the_decoded_one_plus_the_update_rounded_once(name, dtype, case, ids, logits, tmp_path):
    import torch

    made = case(name)
    targets = ["q_proj", "down_proj"] if name != "head" else ["q_proj", "lm_head"]
    model = adapted(load_model(str(made.folder), "float32"), target_modules=targets)
    before = logits(model, ids)
    save_model(model, tmp_path / "merged", dtype=dtype, form="merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for key, parameter in made.twin.named_parameters():
        base = parameter.detach().numpy()
        module = key.removesuffix(".weight").removeprefix("model.").split(".")
        layer = int(module.pop(1)) if module[0] == "layers" else ...
        lora = getattr(_at(model, module), "lora", None) if key.endswith(("proj.weight", "lm_head.weight")) else None
        exact = base.astype(np.float64)
        if lora is not None:
            assert module[-1] in targets
            a, b = (np.asarray(value[layer], np.float64) for value in (lora.lora_a, lora.lora_b))
            exact = exact + float(lora.scale[layer]) * (b @ a)
        wanted = torch.tensor(exact.astype(np.float32)).to(getattr(torch, dtype))
        assert merged[key].dtype == wanted.dtype
        # The sum in float32 may fall on the other side of a tie than float64's: one step of the dtype, and rarely.
        off = (merged[key].float() - wanted.float()).abs().numpy()
        step = np.abs(exact) * (2.0**-7 if dtype == "bfloat16" else 2.0**-22) + 1e-7
        assert (off <= step).all(), key
        assert (off > 0).mean() < (0.01 if dtype == "bfloat16" else 1), key
    in_memory = merge_lora(model, keep=True)
    assert not is_quantized(in_memory)
    np.testing.assert_allclose(logits(in_memory, ids), before, atol=1e-4 if name != "head" else 0.1, rtol=0)
    np.testing.assert_allclose(logits(model, ids), before, atol=0, rtol=0)
    assert is_quantized(model) and nnx.state(model, LoraParam)


def test_merging_into_4bit_quantises_the_merged_weights_again(case, ids, logits, load_quantized_hf, tmp_path):
    import bitsandbytes.functional as bnb
    import torch

    made = case("nested")
    model = adapted(load_model(str(made.folder), "float32"), target_modules=["q_proj"])
    save_model(model, tmp_path / "merged", dtype="float32", form="merged")
    save_model(model, tmp_path / "merged4", form="merged_4bit")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    again = load_quantized_hf(tmp_path / "merged4")
    weight = again.get_parameter("model.layers.1.self_attn.q_proj.weight")
    given = merged["model.layers.1.self_attn.q_proj.weight"]
    codes, state = bnb.quantize_4bit(given, quant_type="nf4", compress_statistics=True)
    assert torch.equal(weight.data, codes) and torch.equal(weight.quant_state.absmax, state.absmax)
    # Untouched modules keep their bytes, and what is loaded computes what the folder says.
    kept = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(again.get_parameter(kept).data, made.theirs.get_parameter(kept).data)
    ours = logits(load_model(str(tmp_path / "merged4"), "float32"), ids)
    np.testing.assert_allclose(ours, logits(again, ids), atol=1e-4, rtol=0)


def test_a_model_with_adapters_is_not_saved_as_it_is(case, tmp_path):
    model = adapted(load_model(str(case("nested").folder), "float32"), target_modules=["q_proj"])
    with pytest.raises(UserError, match=r"has adapters \(layers.self_attn.q_proj.weight, ...\); merge them"):
        save_model(model, tmp_path / "out")


def test_a_tied_head_that_is_trained_over_a_4bit_base_is_merged_as_a_head_of_its_own(case, ids, logits, tmp_path):
    from transformers import AutoModelForCausalLM

    made = case("tied")
    model = adapted(load_model(str(made.folder), "float32"), target_modules=["lm_head", "q_proj"])
    save_model(model, tmp_path / "merged", dtype="float32", form="merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert theirs.config.tie_word_embeddings is False
    np.testing.assert_allclose(logits(theirs, ids), logits(model, ids), atol=1e-4, rtol=0)
    rows = made.twin.model.embed_tokens.weight
    np.testing.assert_array_equal(theirs.model.embed_tokens.weight.detach().numpy(), rows.detach().numpy())


def test_how_the_base_was_quantised_is_read_from_the_adapter_or_refused(tmp_path):
    import torch
    from safetensors.torch import save_file

    def write(text: str) -> None:
        save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors", {"base_quantization_config": text})

    for text, words in (
        ("{", "adapter_model.safetensors: base_quantization_config in its metadata is not JSON"),
        ("[]", "adapter_model.safetensors: base_quantization_config in its metadata is no JSON object"),
        ('{"load_in_8bit": true, "quant_method": "bitsandbytes"}', "bitsandbytes in 8 bit"),
    ):
        write(text)
        with pytest.raises(UserError, match=words):
            read_base_form(tmp_path)
    assert read_base_form(tmp_path / "nowhere") is None
    assert QuantConfig().to_hf("bfloat16")["bnb_4bit_compute_dtype"] == "bfloat16"


def _at(model: Any, path: list[str]) -> Any:
    for name in path:
        model = getattr(model, name)
    return model

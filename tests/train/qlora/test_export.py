"""What is exported of a QLoRA run: the decoded base plus the update, or 4-bit weights that transformers loads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastjax import export

IDS = torch.arange(40).reshape(1, 40)


@pytest.fixture
def exported(finished, flags, tmp_path, capsys):
    """exported(*words, **settings): the folder that `fastjax export` wrote of the run's adapter, and its stderr."""

    def write(*words: str, **settings: Any) -> tuple[Path, str]:
        output = tmp_path / "out"
        adapter = {} if settings.get("format") == "base_4bit" else {"adapter": finished[0] / "adapter"}
        assert export.main([*flags(**{"output_dir": output, **adapter, **settings}), *words]) == 0
        return output, capsys.readouterr().err

    return write


def sums(base: Path, adapter: Path) -> dict[str, np.ndarray]:
    """W + scale B A of every weight in float64, as exact as the check needs."""
    factors = load_file(adapter / "adapter_model.safetensors")
    found = {}
    for name, weight in load_file(base / "model.safetensors").items():
        found[name] = weight.double().numpy()
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" in factors:
            product = factors[f"{prefix}B.weight"].double() @ factors[f"{prefix}A.weight"].double()
            found[name] = found[name] + product.numpy() * (16 / 4)
    return found


def same_but_for_ties(folder: Path, expected: dict[str, np.ndarray]) -> None:
    """The bfloat16 weights are the sums rounded once; a sum in float32 may fall on the other side of a tie."""
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        off = weight.double() - torch.tensor(expected[name]).bfloat16().double()
        assert (off != 0).float().mean() < 0.005, name
        assert (off.abs().numpy() <= np.abs(expected[name]) * 2.0**-7).all(), name


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(IDS).logits.float().numpy()


def test_merged_16bit_is_the_decoded_base_plus_the_update_rounded_once(exported, finished, folders, with_adapter):
    from transformers import AutoModelForCausalLM

    folder, printed = exported()
    assert "the base is read in 4 bit, as the adapter was trained; --no_load_in_4bit keeps 16" in printed
    same_but_for_ties(folder, sums(folders.twin, finished[0] / "adapter"))
    adapted = with_adapter(AutoModelForCausalLM.from_pretrained(folders.twin), finished[0] / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(folder).float()
    np.testing.assert_allclose(logits(merged), logits(adapted), atol=0.1, rtol=0)
    assert not getattr(merged.config, "quantization_config", None)


def test_merged_32bit_answers_as_base_and_adapter_do(exported, finished, folders, with_adapter):
    from transformers import AutoModelForCausalLM

    folder, _ = exported(format="merged_32bit", model=folders.packed)
    adapted = with_adapter(folders.theirs, finished[0] / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_allclose(logits(merged), logits(adapted), atol=1e-4, rtol=0)
    adapted.unload()


def test_the_unquantised_base_is_merged_into_where_that_is_asked_for(exported, finished, folders):
    folder, printed = exported("--no_load_in_4bit")
    assert "4 bit" not in printed
    same_but_for_ties(folder, sums(folders.source, finished[0] / "adapter"))


def test_merged_4bit_says_what_it_loses_and_loads_in_transformers(exported, finished, folders, load_quantized_hf):
    import bitsandbytes.functional as bnb

    folder, printed = exported(format="merged_4bit")
    assert "merged_4bit rounds the merged weights to 4 bit again" in printed
    model = load_quantized_hf(folder)
    assert (folder / "chat_template.jinja").is_file()
    name = "model.layers.1.mlp.up_proj.weight"
    exact = torch.tensor(sums(folders.twin, finished[0] / "adapter")[name]).float()
    codes, _ = bnb.quantize_4bit(exact, quant_type="nf4", compress_statistics=True)
    given = model.get_parameter(name)
    # A sum that is rounded otherwise may lie on the other side of a border between two codes.
    assert (given.data != codes).float().mean() < 0.001
    assert (given.data != folders.theirs.get_parameter(name).data).float().mean() > 0.02


def test_the_4bit_base_alone_is_what_bitsandbytes_makes_of_it(
    exported, folders, quantize_hf, load_quantized_hf, tmp_path
):
    from transformers import AutoModelForCausalLM

    folder, printed = exported(format="base_4bit", model=folders.source)
    assert "warning" not in printed
    quantize_hf(AutoModelForCausalLM.from_pretrained(folders.source), tmp_path / "theirs", "bfloat16")
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if "quant_state" not in name:
            assert torch.equal(ours[name], tensor), name
    assert load_quantized_hf(folder).get_parameter("lm_head.weight").dtype == torch.float32


def test_the_face_loads_trains_and_merges_4bit_models_too(folders, rows, tmp_path, load_quantized_hf, with_adapter):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from fastjax import FastLanguageModel, SFTConfig, SFTTrainer

    bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model, tokenizer = FastLanguageModel.from_pretrained(str(folders.source), dtype="float32", quantization_config=bnb)
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    args = SFTConfig(output_dir=str(tmp_path / "run"), max_steps=2, learning_rate=1e-2, report_to="none")
    trainer = SFTTrainer(model, tokenizer, rows, args=args)
    assert trainer.config.method == "qlora" and trainer.config.bnb_4bit_quant_type == "nf4"
    trainer.train()
    model.save_pretrained(tmp_path / "adapter")
    adapted = with_adapter(folders.theirs, tmp_path / "adapter")
    expected = logits(adapted)
    adapted.unload()
    ours = np.asarray(model(IDS.numpy()).logits)
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), dtype="float32")
    assert again.quantization is not None
    np.testing.assert_array_equal(again(IDS.numpy()).logits, ours)
    sixteen, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), dtype="float32", load_in_4bit=False)
    assert sixteen.quantization is None and np.abs(np.asarray(sixteen(IDS.numpy()).logits) - ours).max() > 0.01
    model.save_pretrained_merged(tmp_path / "merged", save_method="merged_32bit")
    np.testing.assert_allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, atol=1e-4, rtol=0
    )
    with pytest.warns(UserWarning, match="rounds the merged weights to 4 bit again"):
        model.save_pretrained_merged(tmp_path / "four", save_method="merged_4bit_forced")
    assert load_quantized_hf(tmp_path / "four").config.quantization_config.bnb_4bit_quant_type == "nf4"
    model.merge_and_unload()
    assert model.quantization is None
    np.testing.assert_allclose(np.asarray(model(IDS.numpy()).logits), expected, atol=1e-4, rtol=0)

"""QLoRA follows LoRA over the decoded base, and what it leaves behind is used over the base it was trained over."""

import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from fastjax import evaluate, generate
from fastjax.models.base_form import BaseForm
from fastjax.models.quant_config import QuantConfig
from fastjax.train.__main__ import main as train
from fastjax.train.config import TrainConfig
from fastjax.train.parts import open_base, quantization_settings


def test_thirty_steps_follow_lora_over_the_decoded_base(finished, run_of, folders):
    _, losses, eval_loss = finished
    _, expected, expected_eval = run_of("lora", model=folders.twin, method="lora", max_steps=30, lora_dropout=0.1)
    assert len(losses) == len(expected) == 30 and losses[-1] < losses[0] - 0.3
    np.testing.assert_allclose(losses, expected, atol=1e-4, rtol=0)
    assert eval_loss == pytest.approx(expected_eval, abs=1e-4)


def test_the_loss_is_what_peft_and_bitsandbytes_compute_for_the_saved_adapter(finished, folders, rows, peft_loss):
    output, _, eval_loss = finished
    assert eval_loss == pytest.approx(peft_loss(folders.theirs, output / "adapter", rows), abs=1e-5)


def test_evaluate_reads_the_base_as_the_adapter_was_trained(
    finished, settings, flags, folders, rows, peft_loss, capsys
):
    from transformers import AutoModelForCausalLM

    output, _, eval_loss = finished
    words = flags(data=settings["data"], adapter=output / "adapter", dtype="float32", json=True)

    def evaluated(*more: str) -> float:
        assert evaluate.main([*words, *more]) == 0
        printed = capsys.readouterr()
        assert ("the base is read in 4 bit" in printed.err) == (not more)
        return json.loads(printed.out)["eval_loss"]

    assert evaluated() == pytest.approx(eval_loss, abs=1e-6)
    assert evaluated("--model", str(folders.packed), "--load_in_4bit") == pytest.approx(eval_loss, abs=1e-6)
    source = AutoModelForCausalLM.from_pretrained(folders.source)
    over_source = peft_loss(source, output / "adapter", rows)
    assert evaluated("--no_load_in_4bit") == pytest.approx(over_source, abs=1e-5)
    assert abs(over_source - eval_loss) > 1e-3


def test_generate_reads_the_base_as_the_adapter_was_trained(finished, flags, folders, with_adapter, capsys):
    import torch
    from transformers import PreTrainedTokenizerFast

    output = finished[0]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output / "adapter")
    model = with_adapter(folders.theirs, output / "adapter")
    chat = [{"role": "user", "content": "red cat"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + 12 and ids[-1] != 257:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    model.unload()
    words = flags(adapter=output / "adapter", prompt="red cat", max_new_tokens=12, dtype="float32")
    assert generate.main(words) == 0
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(ids[start:], skip_special_tokens=True).rstrip("\n")


def test_training_goes_on_over_a_base_like_the_adapters_own(run_of, folders, settings, flags, tmp_path, capsys):
    quantization = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
    first, _, eval_loss = run_of(
        "fp4", model=folders.source, max_steps=2, learning_rate=0.1, no_bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="fp4", llm_int8_skip_modules="model.layers.1.mlp",
    )  # fmt: skip
    # All rows in one step of learning rate 0: its loss is the evaluation's.
    once = {"adapter": first / "adapter", "max_steps": 1, "learning_rate": 0, "per_device_train_batch_size": 12}
    again, losses, _ = run_of("again", model=folders.source, **once)
    assert losses[0] == pytest.approx(eval_loss, abs=1e-5)
    resolved = yaml.safe_load((again / "config.yaml").read_text())
    assert {name: resolved[name] for name in quantization} == quantization
    assert "model.layers.1.mlp.up_proj" in resolved["llm_int8_skip_modules"]
    # The resolved settings name the same run.
    capsys.readouterr()
    assert train(["--config", str(again / "config.yaml"), "--resume", "auto"]) == 0
    assert "already at step 1 of 1" in capsys.readouterr().out
    words = {**settings, **once, "model": folders.source, "output_dir": tmp_path / "out", "bnb_4bit_quant_type": "nf4"}
    assert train(flags(**words)) == 2
    error = capsys.readouterr().err
    assert "bnb_4bit_quant_type='nf4'" in error and "was trained over a base with 'fp4'; leave" in error


def test_training_goes_on_over_16bit_weights_if_the_adapter_was_trained_so(finished, folders, tmp_path, capsys):
    adapter = finished[0] / "adapter"
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    factors = load_file(adapter / "adapter_model.safetensors")
    save_file(factors, tmp_path / "adapter_model.safetensors", {"base_quantization_config": '{"load_in_4bit": false}'})
    config = TrainConfig(model=str(folders.source), data="rows", output_dir="out", adapter=str(tmp_path))
    base = open_base(config.model)
    goes_on, form = quantization_settings(config, base)
    assert goes_on.method == "lora" and form == BaseForm()
    assert "trained over 16-bit weights, so method=lora; --method qlora quantises them" in capsys.readouterr().err
    asked, form = quantization_settings(config, base, frozenset({"method"}))
    assert asked.method == "qlora" and form == BaseForm(QuantConfig())


def test_a_run_over_a_4bit_folder_is_the_same_and_is_resumed_by_its_own_config(finished, run_of, folders, capsys):
    output, packed, _ = run_of("packed", model=folders.packed, max_steps=30, lora_dropout=0.1)
    assert packed == finished[1]
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert config["bnb_4bit_use_double_quant"] is True and config["llm_int8_skip_modules"] is None
    capsys.readouterr()
    assert train(["--config", str(output / "config.yaml"), "--resume", "auto"]) == 0
    assert "already at step 30 of 30" in capsys.readouterr().out

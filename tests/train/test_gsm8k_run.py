"""A LoRA run of the real model on real rows: the loss falls, and PEFT computes the same for what was saved."""

import json
from pathlib import Path

import pytest

from fastjax.evaluate import main as evaluate
from fastjax.train.__main__ import main as train

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/gsm8k"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimised")]


def _eval_loss(capsys, *arguments):
    assert evaluate([*arguments, "--data", str(DATA / "test32.jsonl"), "--dtype", "float32", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def _peft_loss(smollm2_file, adapter):
    """The mean loss of the target tokens, and their number, by transformers' GGUF loader and PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    model = PeftModel.from_pretrained(base, adapter).eval()
    total, count = 0.0, 0
    for line in (DATA / "test32.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="sum").item()
        count += len(completion)
    return total / count, count


def test_eval_loss_on_gsm8k_falls_and_is_what_peft_computes_for_the_saved_adapter(smollm2_file, tmp_path, capsys):
    before = _eval_loss(capsys, "--model", str(smollm2_file))
    run = tmp_path / "run"
    arguments = {
        "model": smollm2_file, "data": DATA / "train64.jsonl", "output_dir": run, "method": "lora", "dtype": "float32",
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-3,
        "lora_r": 8, "lora_alpha": 16, "max_seq_length": 512, "remat": "none", "report_to": "none",
    }  # fmt: skip
    assert train([word for name, value in arguments.items() for word in (f"--{name}", str(value))]) == 0
    capsys.readouterr()
    after = _eval_loss(capsys, "--model", str(smollm2_file), "--adapter", str(run / "adapter"))
    theirs, count = _peft_loss(smollm2_file, run / "adapter")
    print(f"eval_loss {before['eval_loss']:.4f} -> {after['eval_loss']:.4f}, PEFT {theirs:.6f}")
    assert after["num_target_tokens"] == before["num_target_tokens"] == count
    assert after["eval_loss"] < before["eval_loss"] - 0.1
    assert after["eval_loss"] == pytest.approx(theirs, abs=1e-3)

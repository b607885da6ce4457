"""QLoRA of the real model on real rows follows LoRA over the base that bitsandbytes quantised and decoded."""

import json
from pathlib import Path

import numpy as np
import pytest

from fastjax.train.__main__ import main as train

DATA = Path(__file__).parents[2] / "data/gsm8k/train64.jsonl"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimised")]


def decode_with_bitsandbytes(file: Path, folder: Path) -> None:
    """Writes the folder of a GGUF model whose layers went through NF4 and back."""
    import bitsandbytes.functional as bnb
    import torch
    from transformers import AutoModelForCausalLM

    from fastjax.models.checkpoint.source import open_checkpoint
    from fastjax.models.checkpoint.tokenizer import load_tokenizer, save_tokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, state = bnb.quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            module.weight.data = bnb.dequantize_4bit(codes, state)
    model.hf_quantizer = None  # transformers does not save what came from GGUF, decoded as it is
    del model.config.quantization_config
    model.save_pretrained(folder)
    checkpoint = open_checkpoint(str(file))
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    save_tokenizer(load_tokenizer(checkpoint), folder)


def test_every_one_of_thirty_steps_follows_lora_over_the_decoded_base(smollm2_file, tmp_path, flags):
    pytest.importorskip("bitsandbytes")
    decode_with_bitsandbytes(smollm2_file, tmp_path / "decoded")
    rows = sorted(DATA.read_text().splitlines(), key=len)[:30]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    losses = {}
    for method, model in (("lora", tmp_path / "decoded"), ("qlora", smollm2_file)):
        settings = {
            "model": model, "method": method, "data": tmp_path / "rows.jsonl", "output_dir": tmp_path / method,
            "max_steps": 30, "max_seq_length": 160, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
            "learning_rate": 1e-3, "lora_r": 8, "lora_alpha": 16, "remat": "none", "dtype": "float32",
            "report_to": "none",
        }  # fmt: skip
        assert train(flags(**settings)) == 0
        lines = map(json.loads, (tmp_path / method / "metrics.jsonl").read_text().splitlines())
        losses[method] = [line["loss"] for line in lines if "loss" in line]
    off = np.abs(np.subtract(losses["qlora"], losses["lora"]))
    print(f"losses {losses['qlora'][0]:.4f} to {losses['qlora'][-1]:.4f}, at most {off.max():.1e} apart")
    assert len(off) == 30 and off.max() < 1e-3
    assert np.mean(losses["qlora"][-10:]) < np.mean(losses["qlora"][:10]) - 0.05

"""A tiny Mistral in 32 bit, the same quantised by bitsandbytes, and the float32 twin of that; a run over the first."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Folders(NamedTuple):
    source: Path  # float32
    packed: Path  # 4-bit, as transformers saved it
    twin: Path  # float32, the decoded values
    theirs: Any  # the transformers model of `packed`


@pytest.fixture(scope="session")
def folders(tiny_hf, quantize_hf, decode_hf, model_folder, tmp_path_factory) -> Folders:
    root = tmp_path_factory.mktemp("mistral")
    shape = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
    ends = {"eos_token_id": 257, "pad_token_id": 257, "bos_token_id": None}
    theirs = quantize_hf(tiny_hf("mistral", **shape, **ends, sliding_window=None), root / "packed")
    decode_hf(theirs).save_pretrained(root / "twin")
    found = Folders(root / "packed-float32", root / "packed", root / "twin", theirs)
    for folder in found[:3]:
        for name in TOKENIZER:
            shutil.copy(model_folder / name, folder)
    return found


@pytest.fixture(scope="session")
def flags():
    """flags(**settings): the words of a command line."""
    return lambda **settings: [f"--{k}" if v is True else f"--{k}={v}" for k, v in settings.items()]


@pytest.fixture(scope="session")
def settings(rows_file) -> dict[str, Any]:
    """What all runs here have in common."""
    return {
        "data": rows_file, "eval_data": rows_file, "dtype": "float32", "max_seq_length": 64, "lora_r": 4,
        "target_modules": "q_proj,v_proj,up_proj",
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 12,
        "learning_rate": 1e-3, "report_to": "none",
    }  # fmt: skip


@pytest.fixture(scope="session")
def run_of(settings, flags, tmp_path_factory):
    """run_of(name, **settings): (the run's folder, the losses of its steps, its eval_loss)."""
    from fastjax.train.__main__ import main as train

    def run(name: str, **changes: Any) -> tuple[Path, list[float], float]:
        output = tmp_path_factory.mktemp("runs") / name
        assert train(flags(**{**settings, "output_dir": output, **changes})) == 0
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        return output, losses, [line["eval_loss"] for line in lines if "eval_loss" in line][-1]

    return run


@pytest.fixture(scope="session")
def finished(run_of, folders) -> tuple[Path, list[float], float]:
    """Thirty steps of QLoRA, which is what training does where nothing is said, over the 32-bit folder."""
    return run_of("qlora", model=folders.source, max_steps=30, lora_dropout=0.1)

"""A run over packed rows, from the command line: resumed inside an epoch it ends bit-equal, and nothing is lost."""

import json
import shutil

import numpy as np

from fastjax.train.__main__ import main as train
from fastjax.train.metrics import read_metrics


def test_a_packed_run_resumed_inside_an_epoch_ends_bit_equal(model_folder, rows_file, tmp_path, capsys):
    from safetensors.numpy import load_file

    settings = {
        "model": model_folder, "data": f"{rows_file}*1.5", "method": "lora", "dtype": "float32", "lora_r": 2,
        "target_modules": "q_proj", "max_seq_length": 128, "packing": True, "long_rows": "split", "report_to": "none",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "save_steps": 2,
    }  # fmt: skip
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]
    assert train([*words, f"--output_dir={tmp_path / 'whole'}", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert "6 documents repeated" in printed.err and "rows of 128 tokens" in printed.err
    # Every document of both epochs was trained on, and nothing else.
    lines = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    targets = next(line for line in printed.err.splitlines() if line.startswith("tokens"))
    per_epoch = int(targets.split("targets ")[1].split(" ")[0].replace(",", ""))
    assert sum(line["num_target_tokens"] for line in lines) == 2 * per_epoch == result["num_target_tokens"]
    steps = result["step"]
    assert steps > 4 and steps % 2 == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for step in range(4, steps + 1, 2):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / str(step))
    assert train([*words, f"--output_dir={tmp_path / 'again'}", "--resume=auto", "--json"]) == 0
    assert f"(step 2 of {steps})" in capsys.readouterr().err
    whole, again = (load_file(tmp_path / run / "adapter" / "adapter_model.safetensors") for run in ("whole", "again"))
    assert all(np.array_equal(tensor, again[name]) for name, tensor in whole.items())
    assert [line["loss"] for line in read_metrics(tmp_path / "again" / "metrics.jsonl")] == [x["loss"] for x in lines]

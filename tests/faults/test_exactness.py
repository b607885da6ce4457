"""Run 12 steps, or be killed after 5 and after 9 and go on: the same bytes, for every method; and twice the same."""

import time
from pathlib import Path

import pytest

from fastjax.train.metrics import read_metrics

COMMON = {
    "max_steps": 12, "lora_dropout": 0.1, "gradient_accumulation_steps": 2, "warmup_steps": 3,
    "lr_scheduler_type": "cosine", "save_steps": 1,
}  # fmt: skip
FULL = {"method": "full", "lora_r": None, "lora_dropout": None}
SHORT = {
    "lora": {"method": "lora"},
    "qlora, packing, 8-bit Adam": {"method": "qlora", "packing": True, "optim": "adamw_8bit"},
    "full, 8-bit Adam": {**FULL, "optim": "adamw_8bit"},
}
LONG = {
    "qlora": {"method": "qlora"},
    "qlora, fp4, no double quantisation": {
        "method": "qlora", "bnb_4bit_quant_type": "fp4", "no_bnb_4bit_use_double_quant": True,
    },
    "lora, packing": {"method": "lora", "packing": True},
    "lora, 8-bit Adam": {"method": "lora", "optim": "adamw_8bit"},
    "full": FULL,
    "full, packing": {**FULL, "packing": True},
    "full, bfloat16": {**FULL, "dtype": "bfloat16"},
    "full, bfloat16 moments": {**FULL, "optim": "adamw_bf16"},
}  # fmt: skip
CASES = [*SHORT.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG.items())]


def result(folder: Path) -> dict[str, bytes]:
    """Every file of what the run leaves for use."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for part in ("adapter", "model")
        for file in sorted((folder / part).rglob("*"))
    }


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[case[0] for case in SHORT.items()] + list(LONG))
def test_a_run_killed_twice_ends_in_the_bytes_of_one_that_was_not(server, settings, tmp_path, name, changes):
    flags = {**settings, **COMMON, **changes}
    code, output = server.run({**flags, "output_dir": tmp_path / "whole"})
    assert code == 0, output
    folder = tmp_path / "killed"
    for stop in (5, 9):
        running = server.start({**flags, "output_dir": folder, "resume": "auto"})
        while not any(line["step"] >= stop for line in read_metrics(folder / "metrics.jsonl")):
            time.sleep(0.002)
        running.kill()
        assert running.wait() == -9, running.output()
    code, output = server.run({**flags, "output_dir": folder, "resume": "auto"})
    assert code == 0, output
    assert "going on from" in output
    assert result(tmp_path / "whole") and result(folder) == result(tmp_path / "whole")


def test_the_same_seed_gives_the_same_bytes_twice(server, settings, tmp_path):
    for name in ("first", "second"):
        code, output = server.run({**settings, **COMMON, "method": "qlora", "output_dir": tmp_path / name})
        assert code == 0, output
    assert result(tmp_path / "first") == result(tmp_path / "second")
    code, output = server.run({**settings, **COMMON, "method": "qlora", "seed": 1, "output_dir": tmp_path / "third"})
    assert code == 0, output
    assert result(tmp_path / "third") != result(tmp_path / "first")

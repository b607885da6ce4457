"""Run 12 steps, or be killed after 5 and after 9 and go on: the same bytes, for every method; and twice the same."""

import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fastjax.train.metrics import read_metrics

COMMON = {
    "max_steps": 12, "lora_dropout": 0.1, "gradient_accumulation_steps": 2, "warmup_steps": 3,
    "lr_scheduler_type": "cosine", "save_steps": 1,
}  # fmt: skip
FULL = {"method": "full", "lora_r": None, "lora_dropout": None}
SHORT = {
    "qlora, packing, 8-bit Adam": {"method": "qlora", "packing": True, "optim": "adamw_8bit"},
    "full, 8-bit Adam": {**FULL, "optim": "adamw_8bit"},
}
LONG = {
    "lora": {"method": "lora"},
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


def has_reached(folder: Path, step: int) -> bool:
    return any(line["step"] >= step for line in read_metrics(folder / "metrics.jsonl"))


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
        running.until(partial(has_reached, folder, stop))
        running.kill()
        assert running.wait() == -9, running.output()
    code, output = server.run({**flags, "output_dir": folder, "resume": "auto"})
    assert code == 0, output
    assert "going on from" in output
    assert result(tmp_path / "whole") and result(folder) == result(tmp_path / "whole")


def test_the_same_seed_gives_the_same_bytes_twice(server, settings, tmp_path):
    flags = {**settings, **COMMON, "method": "qlora", "max_steps": 4, "save_steps": 4}
    for name, seed in (("first", 0), ("second", 0), ("third", 1)):
        code, output = server.run({**flags, "seed": seed, "output_dir": tmp_path / name})
        assert code == 0, output
    assert result(tmp_path / "first") == result(tmp_path / "second")
    assert result(tmp_path / "third") != result(tmp_path / "first")


@pytest.mark.parametrize(
    ("there", "override"),
    [
        # The same rows in a micro-batch; then the same rows in a step, cut into other micro-batches.
        ({"mesh": "data=2", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, None),
        pytest.param(
            {"mesh": "data=2", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
            "mesh,gradient_accumulation_steps",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_with_another_number_of_devices(server, settings, tmp_path, there, override):
    from safetensors.numpy import load_file

    here = {**settings, "max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    code, output = server.run({**here, "output_dir": tmp_path / "whole"})
    assert code == 0, output
    folder = tmp_path / "moved"
    running = server.start({**here, "output_dir": folder})
    running.until(partial(has_reached, folder, 3))
    running.kill(signal.SIGTERM)
    assert running.wait() == 143, running.output()
    flags = {**here, **there, "output_dir": folder, "resume": "auto"}
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    if override is not None:
        code, output = server.run(flags, environment=two)
        assert code == 2 and f"--resume_override {','.join(sorted(override.split(',')))}" in output, output
    code, output = server.run({**flags, "resume_override": override}, environment=two)
    assert code == 0 and "going on from" in output, output
    name = "adapter/adapter_model.safetensors"
    ours, theirs = load_file(folder / name), load_file(tmp_path / "whole" / name)
    for key in theirs:
        np.testing.assert_allclose(ours[key], theirs[key], atol=1e-5, err_msg=key)

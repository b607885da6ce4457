"""A clock that jumps changes no decision and no number of a run."""

import os
import time

import pytest

from fastjax.train.metrics import read_metrics

YEARS = 10 * 365 * 86400


@pytest.mark.parametrize("jump", [YEARS, -YEARS])
def test_a_result_of_fewer_steps_is_not_taken_for_that_of_all_whatever_its_time(server, settings, tmp_path, jump):
    folder = tmp_path / "run"
    flags = {**settings, "output_dir": folder, "lr_scheduler_type": "constant"}
    assert server.run({**flags, "max_steps": 2})[0] == 0
    for path in folder.rglob("*"):
        os.utime(path, (time.time() + jump,) * 2)
    stale = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    # Killed between its last checkpoint and its result: the checkpoints go on, the result is the old one.
    running = server.start({**flags, "max_steps": 3, "resume": "auto"})
    running.until((folder / "checkpoints" / "3" / "checkpoint.json").exists)
    running.kill()
    running.wait()
    finished = (folder / "adapter" / "adapter_model.safetensors").read_bytes() != stale
    code, output = server.run({**flags, "max_steps": 3, "resume": "auto"})
    assert code == 0, output
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() != stale
    assert ("already at step 3 of 3" in output) <= finished
    code, output = server.run({**flags, "max_steps": 3, "resume": "auto"})
    assert code == 0 and "already at step 3 of 3" in output


def test_a_clock_that_jumps_in_the_middle_changes_no_time_and_no_number(server, settings, tmp_path, monkeypatch):
    """In this process: the command, with a time.time that leaps ten years every 50 calls, there and back."""
    from fastjax.train.__main__ import main

    flags = {**settings, "max_steps": 3}

    def run(folder):
        argv = [f"--{name}={value}" for name, value in {**flags, "output_dir": folder}.items()]
        assert main(argv) == 0
        lines = read_metrics(folder / "metrics.jsonl")
        assert all(0 < line["step_time_s"] < 600 and line["tokens_per_second"] > 0 for line in lines)
        return [line["loss"] for line in lines], (folder / "adapter" / "adapter_model.safetensors").read_bytes()

    straight = run(tmp_path / "straight")
    now, calls = time.time, []

    def leaping():
        calls.append(None)
        return now() + (len(calls) // 50 % 2) * YEARS

    monkeypatch.setattr(time, "time", leaping)
    assert run(tmp_path / "leaping") == straight
    assert len(calls) > 100

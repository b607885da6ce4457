"""Two processes are one run: they train as one does, end together however one of them ends, and go on together."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastjax.train.__main__ import main


def newest(run: Path) -> int:
    """The step of the newest whole checkpoint; 0 if there is none."""
    return max((int(file.parent.name) for file in run.glob("checkpoints/[0-9]*/checkpoint.json")), default=0)


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def assert_same_result(run: Path, other: Path) -> None:
    ours, theirs = losses(run), losses(other)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)
    adapter, expected = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (run, other))
    assert adapter.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(adapter[name], value, atol=1e-5, err_msg=name)
    assert max(float(np.abs(value).max()) for name, value in expected.items() if "lora_B" in name) > 1e-3


@pytest.mark.parametrize("mesh", ["data=2", pytest.param("fsdp=2", marks=pytest.mark.slow)])
def test_killed_stopped_resumed_and_equal_to_one_device(
    mesh, start_pair, model_folder, rows_file, same_flags, tmp_path
) -> None:
    run = tmp_path / "run"
    job = ("--model", model_folder, "--data", rows_file)
    split = ("--mesh", mesh, "--per_device_train_batch_size", "1", "--save_steps", "10")
    together = (*job, "--output_dir", run, *split)

    pair = start_pair(*together, "--max_steps", "100000")
    pair.wait_until(lambda: newest(run) >= 10)
    pair.processes[1].kill()
    killed = time.monotonic()
    assert pair.processes[0].wait(30) not in (0, 1)
    print(f"process 0 ended {time.monotonic() - killed:.1f} s after process 1 was killed")
    assert "lost" in pair.said(0) and "--resume auto" in pair.said(0)

    pair = start_pair(*together, "--max_steps", "100000", "--resume", "auto")
    since = newest(run)
    pair.wait_until(lambda: newest(run) > since)
    pair.processes[1].send_signal(signal.SIGTERM)
    assert pair.wait() == [128 + signal.SIGTERM] * 2, pair.said(0)
    assert f"going on from {run / 'checkpoints' / str(since)}" in pair.said(0)
    assert "stopped by SIGTERM" in pair.said(0) and "going on from" not in pair.said(1)

    total = newest(run) + 2
    pair = start_pair(*together, "--max_steps", str(total), "--resume", "auto")
    assert pair.wait() == [0, 0], pair.said(0) + pair.said(1)
    alone = ("--output_dir", tmp_path / "alone", "--max_steps", total, "--save_steps", total)
    assert main([*same_flags, *map(str, (*job, *alone, "--per_device_train_batch_size", 2))]) == 0
    assert_same_result(run, tmp_path / "alone")


def test_a_mistake_in_one_process_ends_both(start_pair, model_folder, rows_file, tmp_path) -> None:
    job = ("--model", model_folder, "--data", rows_file, "--output_dir", tmp_path / "run", "--mesh", "data=2")
    pair = start_pair(*job, second=("--learning_rat", "1"))
    assert pair.wait() == [2, 2]
    assert "unknown flag --learning_rat" in pair.said(1)
    assert "process 1 of 2" in pair.said(0) and "has ended" in pair.said(0) and not (tmp_path / "run").exists()


def test_a_run_of_one_told_process_keeps_its_exit_code_and_message(rows_file, tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = ("--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--num_processes", "1", "--process_id", "0")
    flags = (*place, "--model", tmp_path / "none", "--data", rows_file, "--output_dir", tmp_path / "run")
    command = [sys.executable, "-m", "fastjax.train", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and str(tmp_path / "none") in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "words"),
    [
        (("--seed", "1"), "settings must be the same in all processes: seed is 1 here and 3407 in process 0"),
        (("--max_grad_norm", "-1"), "max_grad_norm=-1"),
        (("--data", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_other_mistakes_in_one_process(second, words, start_pair, model_folder, rows_file, tmp_path) -> None:
    job = ("--model", model_folder, "--output_dir", tmp_path / "run", "--mesh", "data=2")
    data = ("--data", str(rows_file))
    pair = start_pair(*job, first=data, second=(*(() if "--data" in second else data), *second))
    assert pair.wait() == [2, 2], pair.said(0) + pair.said(1)
    assert words in pair.said(1) and "process 1 of 2" in pair.said(0)


@pytest.mark.slow
def test_the_coordinator_is_lost(start_pair, model_folder, rows_file, tmp_path) -> None:
    run = tmp_path / "run"
    job = ("--model", model_folder, "--data", rows_file, "--output_dir", run, "--mesh", "data=2", "--save_steps", "10")
    pair = start_pair(*job, "--max_steps", "100000")
    pair.wait_until(lambda: newest(run) >= 10)
    pair.processes[0].kill()
    killed = time.monotonic()
    assert pair.processes[1].wait(30) not in (0, 1)
    print(f"process 1 ended {time.monotonic() - killed:.1f} s after process 0 was killed")
    time.sleep(1)
    assert "lost" in pair.said(1) and "--resume auto" in pair.said(1)

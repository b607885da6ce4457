"""SIGKILL at any moment of a run: nothing is torn, nothing is lost, and the end is the same bytes."""

import contextlib
import itertools
import json
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from fastjax.train.manifest import damage
from fastjax.train.metrics import read_metrics
from fastjax.train.state import CheckpointStore

STEPS = 24
TIMES = ("tokens_per_second", "step_time_s")


@pytest.fixture(scope="module")
def whole(server, settings, tmp_path_factory):
    """A run that nobody kills, and how long one takes, in seconds, that has nothing to compile."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    begin = time.monotonic()
    code, output = server.run({**settings, "output_dir": folder, "max_steps": STEPS})
    assert code == 0, output
    return folder, 0.7 * (time.monotonic() - begin)


def metrics(folder: Path) -> list[dict]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def is_saving(folder: Path, before: set[str]) -> bool:
    """Whether a checkpoint is being written that was not there before."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return any(name.endswith(".tmp") for name in names - before)


@pytest.mark.parametrize(
    "kills", [pytest.param(5, id="5 kills"), pytest.param(40, id="40 kills", marks=pytest.mark.slow)]
)
def test_killed_runs_lose_nothing_and_end_in_the_same_bytes(server, settings, whole, tmp_path, kills):
    expected, seconds = whole
    draw = random.Random(kills)
    flags = {**settings, "max_steps": STEPS, "resume": "auto"}
    done = 0
    for number in itertools.count():
        folder = tmp_path / f"run{number}"
        store, reached = CheckpointStore(folder / "checkpoints"), -1
        while True:
            before = {path.name for path in store.folder.iterdir()} if store.folder.is_dir() else set()
            running = server.start({**flags, "output_dir": folder})
            if done < kills:
                # Half of them while a checkpoint is being written, half at any moment of a run's life.
                if done % 2:
                    with contextlib.suppress(AssertionError):
                        running.until(partial(is_saving, store.folder, before))
                    time.sleep(draw.uniform(0, 0.08))
                else:
                    time.sleep(draw.uniform(0, seconds))
                running.kill()
            code = running.wait()
            assert code in (0, -9), running.output()
            done += code == -9
            assert [damage(store.path(step)) for step in store.steps()] == [None] * len(store.steps())
            newest, complaints = store.newest()
            assert complaints == []
            at = -1 if newest is None else int(newest.name)
            assert at >= reached, "a checkpoint was lost"
            reached = at
            if code == 0:
                break
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (folder / "adapter" / name).read_bytes() == (expected / "adapter" / name).read_bytes()
        assert metrics(folder) == metrics(expected)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
        assert sorted(path.name for path in folder.rglob(".*")) == []
        if done >= kills:
            break


def test_a_second_interrupt_stops_at_once(server, settings, tmp_path):
    running = server.start({**settings, "output_dir": tmp_path / "run", "max_steps": 5000, "save_steps": 5000})
    running.until(lambda: metrics(tmp_path / "run"))
    running.kill(signal.SIGINT)
    running.until(lambda: "press Ctrl-C to stop at once" in running.output())
    with contextlib.suppress(ProcessLookupError):
        running.kill(signal.SIGINT)
    assert running.wait() == 130
    assert "Traceback" not in running.output()
    assert CheckpointStore(tmp_path / "run" / "checkpoints").newest()[1] == []

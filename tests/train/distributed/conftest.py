"""Two processes of one run on this machine's CPU."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

SAME = (
    "--method", "lora", "--dtype", "float32", "--max_seq_length", "64", "--lora_r", "2", "--learning_rate", "1e-4",
    "--lr_scheduler_type", "constant", "--gradient_accumulation_steps", "2", "--report_to", "none",
)  # fmt: skip
_LONGEST_S = 180.0


class Pair:
    """`python -m fastjax.train` twice, connected; stderr and stdout of each go into one file.

    Attributes: processes: process 0 and process 1.
    """

    def __init__(self, folder: Path, flags: Sequence[Sequence[str | Path]]) -> None:
        """Args: flags: of each process, beside where it stands."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = ("--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--num_processes", "2")
        # A device a process, whatever the tests' own process has.
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        self._logs = [folder / f"log{number}" for number in range(2)]
        self.processes = []
        for number, log in enumerate(self._logs):
            words = [*place, "--process_id", number, *flags[number]]
            command = [sys.executable, "-m", "fastjax.train", *map(str, words)]
            with log.open("wb") as file:
                process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment)
            self.processes.append(process)

    def said(self, number: int) -> str:
        """What a process has printed so far."""
        return self._logs[number].read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns once the condition holds; fails if a process ends before."""
        until = time.monotonic() + _LONGEST_S
        while not condition():
            ended = [process.poll() is not None for process in self.processes]
            assert not any(ended) and time.monotonic() < until, f"{self.said(0)[-2000:]}\n---\n{self.said(1)[-2000:]}"
            time.sleep(0.05)

    def wait(self) -> list[int]:
        """The exit codes, once both have ended."""
        return [process.wait(_LONGEST_S) for process in self.processes]

    def kill(self) -> None:
        """Ends what is left."""
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def same_flags() -> tuple[str, ...]:
    """What a Pair's processes are told in any case, for a run in one process that shall be the same."""
    return SAME


@pytest.fixture
def start_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """start_pair(*flags, first=(), second=()): a Pair, with further flags for either process; ended with the test."""
    started: list[Pair] = []

    def start(*flags: str | Path, first: Sequence[str] = (), second: Sequence[str] = ()) -> Pair:
        folder = tmp_path / f"pair{len(started)}"
        folder.mkdir()
        started.append(Pair(folder, [[*SAME, *flags, *more] for more in (first, second)]))
        return started[-1]

    yield start
    for pair in started:
        pair.kill()

"""A tiny model with an adapter and a run of it, and real processes to kill."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FORK_SERVER = Path(__file__).with_name("fork_server.py")


@dataclass
class Running:
    """A command in a process of its own."""

    server: "Server"
    pid: int
    log: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        return self.server.ask({"wait": self.pid})["code"]

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Server:
    """fork_server.py, and what it is asked."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._count = logs, 0
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(FORK_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=FORK_SERVER.parents[2],
        )  # fmt: skip
        self.threads = self._answer()["threads"]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def start(
        self,
        flags: dict[str, Any],
        module: str = "fastjax.train.__main__",
        folder: Path | None = None,
        limits: dict[str, int] | None = None,
    ) -> Running:
        """A command; a flag's value of True is a bare switch, None leaves it out."""
        argv = [
            f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items() if value is not None
        ]
        self._count += 1
        log = self._logs / f"{self._count}.log"
        job = {"start": [module, argv], "log": str(log), "folder": str(folder or self._logs), "limits": limits or {}}
        return Running(self, self.ask(job)["pid"], log)

    def run(self, flags: dict[str, Any], **options: Any) -> tuple[int, str]:
        """Exit code and output of a command that is let alone."""
        running = self.start(flags, **options)
        return running.wait(), running.output()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """Starts commands as processes that can be killed."""
    server = Server(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def even_rows(tmp_path_factory) -> Path:
    """Twelve chats of one length: a run compiles one step."""
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("data") / "even.jsonl"
    with file.open("w") as stream:
        for _ in range(12):
            words = ["".join(draw.choices("abcdefgh", k=8)) for _ in range(2)]
            messages = [
                {"role": role, "content": word} for role, word in zip(("user", "assistant"), words, strict=True)
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return file


@pytest.fixture(scope="session")
def settings(model_folder, even_rows) -> dict[str, Any]:
    """Flags of a small run; `output_dir` is missing."""
    return {
        "model": model_folder, "data": even_rows, "dtype": "float32", "data_cache_dir": "off", "max_seq_length": 64,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "lora_r": 2,
        "method": "lora", "report_to": "none", "save_steps": 1,
    }  # fmt: skip


@pytest.fixture
def tmpfs(tmp_path) -> Iterator[Any]:
    """A function that mounts a small file system; skips where mounting is not allowed."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        _mount(["-t", "tmpfs", "-o", f"size={size}", "none"], place)
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def read_only(tmp_path) -> Iterator[Any]:
    """A function that shows a folder a second time, read-only; skips where mounting is not allowed."""
    mounted: list[Path] = []

    def mount(folder: Path) -> Path:
        place = tmp_path / f"read_only{len(mounted)}"
        place.mkdir()
        _mount(["--bind", str(folder)], place)
        mounted.append(place)
        _mount(["-o", "remount,ro,bind"], place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture(scope="session")
def adapter_folder(model_folder, tmp_path_factory) -> Path:
    """An adapter over the tiny model, as a run saves it."""
    import jax

    from fastjax.models.checkpoint.files import replace_folder
    from fastjax.models.checkpoint.load import load_model
    from fastjax.models.checkpoint.source import open_checkpoint
    from fastjax.models.checkpoint.tokenizer import load_tokenizer, save_tokenizer
    from fastjax.models.lora import LoraConfig, apply_lora
    from fastjax.models.peft_io import save_adapter

    model = load_model(open_checkpoint(str(model_folder)), "float32")
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    apply_lora(model, config, jax.random.key(0))
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    with replace_folder(folder) as target:
        save_adapter(model, config, target, str(model_folder))
        save_tokenizer(load_tokenizer(model_folder), target)
    return folder


@pytest.fixture
def copy_of(tmp_path):
    """A function that copies a folder, so that it can be damaged."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / f"copy_{len(list(tmp_path.iterdir()))}"))

    return copy


def _mount(words: list[str], place: Path) -> None:
    done = subprocess.run(["mount", *words, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")

"""A tiny model with an adapter and a run of it, and real processes to kill."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastjax.errors import UserError

FORK_SERVER = Path(__file__).with_name("fork_server.py")
GONE = object()


@dataclass
class Running:
    """A command in a process of its own."""

    server: "Server"
    pid: int
    log: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def until(self, condition: Callable[[], Any]) -> None:
        """Returns once the condition holds; fails if the command ends before that."""
        while not condition():
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert state != "Z", f"it ended too early: {self.output()}"
            time.sleep(0.001)

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
        environment: dict[str, str] | None = None,
    ) -> Running:
        """A command; a flag's value of True is a bare switch, None leaves it out."""
        argv = [
            f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items() if value is not None
        ]
        self._count += 1
        log = self._logs / f"{self._count}.log"
        job = {
            "start": [module, argv], "log": str(log), "folder": str(folder or self._logs), "limits": limits or {},
            "environment": environment or {},
        }  # fmt: skip
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


@pytest.fixture(scope="session", name="settings")
def flags_of_a_small_run(model_folder, even_rows) -> dict[str, Any]:
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


class Fuzz:
    """Broken inputs of all kinds, and the demand that each is read or refused in words, in a second."""

    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-3, 300), st.floats(), st.text(max_size=8),
        st.sampled_from([2**31, 2**63, 10**400, -1, 0, 1, "0", "", "..", "/etc/passwd", "\0", "\ud800", [], {}, [[]]]),
    )  # fmt: skip
    json = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=6,
    )

    def near(self, sound: dict[str, Any]) -> st.SearchStrategy[bytes]:
        """JSON texts like that of a sound object, with some values others, gone or new; one in five not even JSON."""
        keys = st.sampled_from(sorted(sound)) | st.text(max_size=6)
        changes = st.dictionaries(keys, self.json | st.just(GONE), min_size=1, max_size=3)
        changed = changes.map(lambda new: {k: v for k, v in {**sound, **new}.items() if v is not GONE})
        texts = changed.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
        return st.one_of(
            texts, texts, texts, self.json.map(lambda value: json.dumps(value).encode()), self.broken(texts)
        )

    def broken(self, texts: st.SearchStrategy[bytes], within: int = 10**6) -> st.SearchStrategy[bytes]:
        """The bytes with a few of the first `within` others, and perhaps cut short."""

        @st.composite
        def draw_one(draw: Any) -> bytes:
            contents = bytearray(draw(texts))
            for _ in range(draw(st.integers(0, 4))):
                if contents:
                    at = draw(st.integers(0, min(len(contents), within) - 1))
                    contents[at] = draw(st.integers(0, 255))
            return bytes(contents[: draw(st.integers(0, len(contents)))] if draw(st.booleans()) else contents)

        return draw_one()

    def run(self, examples: int, inputs: st.SearchStrategy[Any], read: Callable[[Any], Any], name: str) -> None:
        """Reads so many inputs.

        Args: name: what every refusal must name.
        """
        refused = []

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(inputs)
        def check(one: Any) -> None:
            begin = time.thread_time()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    read(one)
            except UserError as error:
                assert name in str(error), str(error)
                refused.append(error)
            assert time.thread_time() - begin < 1

        check()
        # Most of what is made up here is unsound: readers that take all of it do not look.
        assert len(refused) > examples // 4


@pytest.fixture(scope="session")
def fuzz() -> Fuzz:
    return Fuzz()

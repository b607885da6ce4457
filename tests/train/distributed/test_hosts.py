"""Where a process stands, what it reads, and how it tells its end; no second process is started."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from fastjax.cli import parse
from fastjax.errors import ProcessLost, UserError
from fastjax.hosts import connect, exchange, watch
from fastjax.hosts.connect import Place, place_of
from fastjax.train.agreed_stop import AgreedStop
from fastjax.train.config import TrainConfig
from fastjax.train.data import train_batches
from fastjax.train.data.dataset import TokenisedDataset
from fastjax.train.data.report import DataReport
from fastjax.train.data.tokenise import TokenRow
from fastjax.train.mesh import check_covers_processes, local_rows

HOST = "node1:1234"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("auto", HOST, None, None), "distributed=auto finds the processes itself, and coordinator='node1:1234'"),
        (("none", HOST, None, None), "coordinator='node1:1234' without num_processes and process_id"),
        (("none", None, 2, 0), "num_processes=2 without coordinator"),
        (("none", HOST, 2, 2), "process_id=2 with num_processes=2; processes count from 0 to 1"),
        (("none", "node1", 2, 0), "coordinator='node1' is not host:port"),
        (("none", "node1:70000", 2, 0), "coordinator='node1:70000' is not host:port"),
    ],
)
def test_settings_that_contradict_each_other(settings, words) -> None:
    with pytest.raises(UserError, match=words):
        place_of(*settings)


def test_a_place() -> None:
    assert place_of("none", None, None, None) is None
    assert place_of("auto", None, None, None) == Place()
    assert place_of("none", "[::1]:1234", 2, 1) == Place("[::1]:1234", 2, 1)
    # Of flags that cannot be read, to tell the others.
    flags = ["--coordinator", HOST, "--num-processes=2", "--process_id", "1", "--learning_rat", "3"]
    assert connect._place_in(flags) == Place(HOST, 2, 1)
    assert connect._place_in(["--process_id", "one", "--coordinator", HOST]) is None


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of this host cannot be had"):
            connect._check_port(Place(f"localhost:{port}", 2, 0))
        connect._check_port(Place(f"localhost:{port}", 2, 1))


def test_one_process_asks_nobody() -> None:
    assert exchange.from_first(lambda: {"a": 1}) == {"a": 1} and exchange.is_first()
    exchange.check_same("settings", {"a": 1})
    exchange.barrier()
    with AgreedStop() as stop:
        assert not stop.requested() and not stop
    assert watch.lost(jax.errors.JaxRuntimeError("Connection closed by peer")) is None


class Store:
    """What exchange asks of jax's client, between two processes of which the other one is only told of."""

    def __init__(self, process_id: int) -> None:
        self.process_id, self.values = process_id, {}

    def key_value_set(self, key: str, value: str) -> None:
        if key in self.values:
            raise RuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]


@pytest.fixture
def second_of_two(monkeypatch) -> Store:
    store = Store(1)
    monkeypatch.setattr(exchange, "client", lambda: store)
    monkeypatch.setattr(exchange, "num_processes", lambda: 2)
    monkeypatch.setattr(exchange, "process_id", lambda: 1)
    monkeypatch.setattr(exchange, "unique", lambda what: what)
    return store


def test_what_the_first_process_finds_wrong_is_wrong_in_all(second_of_two: Store) -> None:
    second_of_two.values["fastjax/from_first"] = '{"error": "output_dir is not empty"}'
    with pytest.raises(UserError, match="output_dir is not empty"):
        exchange.from_first(lambda: pytest.fail("asked here"))
    second_of_two.values["fastjax/from_first"] = '{"value": {"seed": 1, "optim": "adamw"}}'
    exchange.check_same("settings", {"seed": 1, "optim": "adamw"})
    with pytest.raises(
        UserError, match="settings must be the same in all processes: seed is 2 here and 1 in process 0"
    ):
        exchange.check_same("settings", {"seed": 2, "optim": "adamw"})


def test_all_stop_at_the_first_call_that_none_has_come_to(second_of_two: Store) -> None:
    stop = AgreedStop()
    assert not any(stop.requested() for _ in range(3))
    second_of_two.values[f"fastjax/{stop._key}/calls/0"] = "5"
    stop._agree(15)
    assert [stop.requested() for _ in range(3)] == [False, False, True] and stop.name == "SIGTERM"


def test_a_failed_computation_is_a_lost_process(second_of_two: Store) -> None:
    found = watch.lost(jax.errors.JaxRuntimeError("INTERNAL: Connection closed by peer\nmore"))
    assert (
        isinstance(found, ProcessLost) and "Connection closed by peer" in str(found) and "--resume auto" in str(found)
    )
    assert watch.lost(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")) is None
    assert watch.lost(ValueError("x")) is None


def test_every_device_of_several_processes_must_be_in_the_mesh(monkeypatch) -> None:
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    check_covers_processes(mesh)
    monkeypatch.setattr("fastjax.train.mesh.num_processes", lambda: 2)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(UserError, match="has 1 devices, and the 2 processes of this run have 2.*data=2"):
        check_covers_processes(mesh)
    assert local_rows(mesh, 6) == [range(6)]


def test_a_process_reads_its_own_rows() -> None:
    rows = [TokenRow(np.full(3 + i, i + 1, np.int32), np.ones(3 + i, bool)) for i in range(8)]
    data = TokenisedDataset(rows, DataReport("rows"))
    whole, part = (
        next(iter(train_batches(data, batch_size=4, accumulation=2, seed=0, local_rows=here)))
        for here in (None, [range(1, 3)])
    )
    for name, array in whole.items():
        np.testing.assert_array_equal(part[name][:, 1:3], array[:, 1:3])
        assert not part[name][:, [0, 3]].any()


@pytest.mark.parametrize("told", [True, False])
def test_a_process_that_is_ended_from_outside_has_a_witness(told: bool) -> None:
    code = "import os, sys\nfrom fastjax.hosts.witness import Witness\nwitness = Witness('gone')\n"
    code += "witness.dismiss()\n" if told else ""
    code += "os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9 and done.stderr == ("" if told else "gone\n")


def test_the_commands_of_the_page_can_be_read(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: m\ndata: d.jsonl\noutput_dir: o\n")
    page = (Path(__file__).parents[3] / "docs/multi_gpu.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [line.split("fastjax.train")[1].split(" #")[0] for line in page.splitlines() if line.startswith("    ")
                and "-m fastjax.train" in line]  # fmt: skip
    places = []
    for command in commands:
        words = [word for word in shlex.split(command) if word != "..."]
        config, _ = parse(TrainConfig, words if "--config" in words else [*words, "--config", "run.yaml"])
        config.validate()
        places.append(config.place)
    assert {None, Place(), Place("node1:12345", 2, 0), Place("node1:12345", 2, 1)} == set(places)

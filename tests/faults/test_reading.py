"""What lies in a model's or an adapter's folder never runs, is never believed, and takes neither time nor memory."""

import json
import os
import pickle
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import read_json
from fastjax.models.checkpoint.gguf_header import read_gguf_header
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.safetensors_header import MAX_HEADER_BYTES, read_header
from fastjax.models.checkpoint.source import open_checkpoint

MIB = 1 << 20
TEMPLATES = {
    "calls the system": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "reaches for a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "writes through a lipsum": "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "changes what it is given": "{{ messages.append(1) }}",
    "opens a file": "{% include '/etc/passwd' %}",
}


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def add_to(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def watched(server, settings, model_folder, tmp_path):
    """A function that trains over a changed copy of the model: nothing but the run's folder may be written."""
    home = tmp_path / "home"
    home.mkdir()
    model = Path(shutil.copytree(model_folder, tmp_path / "model"))
    canary = tmp_path / "CANARY"

    def run(change, expected: int = 2, **flags) -> str:
        change(model, canary)
        before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
        output_dir = tmp_path / "run"
        flags = {**settings, "model": model, "output_dir": output_dir, "max_steps": 1, **flags}
        code, output = server.run(flags, folder=home)
        assert code == expected, output
        assert "Traceback" not in output
        after = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
        changed = [
            path for path in after if before.get(path) != after[path] and output_dir not in (path, *path.parents)
        ]
        assert not canary.exists() and set(changed) <= {tmp_path}
        return output

    return run


def test_a_pickle_is_never_loaded(watched):
    def change(model: Path, canary: Path) -> None:
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(canary)))

    assert "pytorch_model.bin, a pickle" in watched(change)


def test_code_in_a_model_folder_is_never_run(watched):
    def change(model: Path, canary: Path) -> None:
        for name in ("modeling_evil", "tokenization_evil", "configuration_evil", "sitecustomize", "conftest"):
            (model / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
        auto = {"AutoTokenizer": ["tokenization_evil.T", "tokenization_evil.T"]}
        add_to(model / "tokenizer_config.json", auto_map=auto, trust_remote_code=True)

    watched(change, expected=0)


def test_a_config_that_asks_for_code_is_refused(watched):
    def change(model: Path, canary: Path) -> None:
        (model / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
        add_to(model / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.M"})

    assert "auto_map, code that comes with the model" in watched(change)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_template_is_locked_in(watched, kind):
    def change(model: Path, canary: Path) -> None:
        (model / "chat_template.jinja").write_text(TEMPLATES[kind].replace("CANARY", str(canary)))

    output = watched(change)
    assert "chat template" in output


def test_links_of_the_hubs_cache_are_followed_and_no_name_leads_out(model_folder, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model_folder.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    names = open_checkpoint(str(snapshot)).tensors.names()
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert open_checkpoint(str(snapshot)).tensors.names() == names
    for shard in ("../../blobs/3", "/etc/hostname", "..\\x", ""):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
        with pytest.raises(UserError, match="not a plain name inside the folder"):
            open_checkpoint(str(snapshot))


def gguf(*parts: bytes) -> bytes:
    return b"GGUF" + (3).to_bytes(4, "little") + b"".join(parts)


def number(value: int, width: int = 8) -> bytes:
    return value.to_bytes(width, "little")


ONE_KEY = (number(1), number(1), number(1), b"k")
ONE_LIST = (*ONE_KEY, number(9, 4))
MANY_TENSORS = b"{" + b",".join(b'"%06x":{}' % n for n in range(MAX_HEADER_BYTES // 12))
# Files that ask for more than they are worth: (reader, first bytes, size of the file). The rest is a hole.
GREEDY = {
    "safetensors: a header of 2^63 bytes": (read_header, number(2**63), 16),
    "safetensors: a header as long as the file": (read_header, number(2**32 - 8), 2**32),
    "safetensors: the longest header, of nothing": (read_header, number(MAX_HEADER_BYTES), 2**32),
    "safetensors: the longest header, of lists": (
        read_header, number(MAX_HEADER_BYTES) + b"[" * MAX_HEADER_BYTES, 2**32,
    ),
    "safetensors: the longest header, of tensors": (
        read_header, number(len(MANY_TENSORS) + 1) + MANY_TENSORS + b"}", 2**32,
    ),
    "gguf: 2^60 tensors": (read_gguf_header, gguf(number(2**60), number(0)), 1000),
    "gguf: as many entries as fit": (read_gguf_header, gguf(number(0), number(2**28)), 2**32),
    "gguf: as many tensors as fit": (read_gguf_header, gguf(number(2**27), number(0)), 2**32),
    "gguf: a list as long as the file": (read_gguf_header, gguf(*ONE_LIST, number(0, 4), number(2**32 - 99)), 2**32),
    "gguf: the longest list": (read_gguf_header, gguf(*ONE_LIST, number(12, 4), number(2**21)), 2**32),
    "gguf: a list of strings as long as the file": (
        read_gguf_header, gguf(*ONE_LIST, number(8, 4), number(2**28)), 2**32,
    ),
    "gguf: a name as long as the file": (read_gguf_header, gguf(number(0), number(1), number(2**32 - 64)), 2**32),
    "gguf: a text as long as the file": (read_gguf_header, gguf(*ONE_KEY, number(8, 4), number(2**31)), 2**32),
    "json: 4 GiB": (read_json, b"{", 2**32),
    "json: lists in lists": (read_json, b"[" * 10**6, 10**6),
}  # fmt: skip


@pytest.mark.parametrize("case", GREEDY)
def test_a_file_that_claims_too_much_is_refused_in_a_second_and_200_mb(tmp_path, case):
    reader, start, size = GREEDY[case]
    file = tmp_path / "greedy.bin"
    with file.open("wb") as stream:
        stream.write(start)
        stream.truncate(size)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(UserError, match="greedy.bin"):
        reader(file)
    assert time.thread_time() - begin < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


@pytest.mark.parametrize("reader", [read_json, read_header])
def test_a_pipe_is_not_waited_for(tmp_path, reader):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe"):
        reader(tmp_path / "pipe")


def test_the_values_of_a_file_are_not_believed_before_they_are_checked(model_folder, tmp_path):
    """config.json that claims a model of petabytes is compared with the weights, not built."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for key in ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"):
        (folder / "config.json").write_text(json.dumps({**config, key: np.iinfo(np.int32).max}))
        begin = time.thread_time()
        with pytest.raises(UserError, match=f"{key}|has shape"):
            load_model(open_checkpoint(str(folder)), "float32")
        assert time.thread_time() - begin < 1

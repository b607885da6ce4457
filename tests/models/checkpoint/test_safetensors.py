"""safetensors files: broken ones are refused before anything is mapped, sound ones agree with the library."""

import json
import os
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.models.checkpoint.safetensors_io import CHECKSUMS, SafetensorsFile, read_safetensors, write_safetensors


def entry(shape: list, offsets: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN = {
    "a header length of 2^63": (b"{}", b"", 2**63, "header claims 9223372036854775808"),
    "a header longer than any model's": (b"{", b" " * (9 << 20), 9 << 20, "at most"),
    "a header that is not JSON": (b"{nonsense", b"", None, "not JSON"),
    "a header nested without end": (b"[" * 100_000, b"", None, "not JSON"),
    "a header that is a list": (b"[]", b"", None, "not a JSON object"),
    "a header that is not UTF-8": (b'{"\xff": 1}', b"", None, "not JSON"),
    "offsets past the end": ({"a": entry([2], [0, 8])}, b"1234", None, "download complete"),
    "offsets beyond 64 bits": ({"a": entry([2**70], [0, 2**72])}, b"1234", None, "download complete"),
    "overlapping ranges": (
        {"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, b"x" * 12, None, "b overlap",
    ),
    "a hole between ranges": ({"a": entry([1], [0, 4]), "b": entry([1], [8, 12])}, b"x" * 12, None, "hole"),
    "bytes that no tensor owns": ({"a": entry([1], [0, 4])}, b"x" * 12, None, "file has"),
    "a shape that does not fill its range": ({"a": entry([3], [0, 8])}, b"x" * 8, None, "needs 12 bytes and has 8"),
    "offsets that run backwards": ({"a": entry([2], [8, 0])}, b"x" * 8, None, "data_offsets"),
    "a negative dimension": ({"a": entry([-2, -1], [0, 8])}, b"x" * 8, None, "shape"),
    "a dimension that is true": ({"a": entry([True, 2], [0, 8])}, b"x" * 8, None, "shape"),
    "a fractional offset": ({"a": entry([2], [0, 8.0])}, b"x" * 8, None, "data_offsets"),
    "an unknown dtype": ({"a": entry([2], [0, 8], "F37")}, b"x" * 8, None, "F37"),
    "a dtype that is a list": ({"a": {**entry([2], [0, 8]), "dtype": []}}, b"x" * 8, None, "dtype"),
    "an entry without a shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, b"x" * 8, None, "entry of a"),
    "metadata that holds numbers": ({"__metadata__": {"a": 1}}, b"", None, "__metadata__"),
    "a tensor named twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"1234", None, "names 'a' twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_in_a_second_and_a_hundred_megabytes(case: str, raw_safetensors: Callable) -> None:
    header, data, length, words = BROKEN[case]
    path = raw_safetensors(header, data, length)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(UserError, match="(?s)" + words) as caught:
        SafetensorsFile(path)
    assert time.perf_counter() - start < 1.0
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_a_file_of_less_than_eight_bytes_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(UserError, match="4 bytes"):
        SafetensorsFile(tmp_path / "short")
    with pytest.raises(UserError, match="No such file"):
        SafetensorsFile(tmp_path / "missing")


DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_]


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_of_the_library_are_read_bit_for_bit(dtype: type, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    values = np.random.default_rng(0).integers(0, 255, (5, 7)).astype(dtype)
    save_file({"a": values, "empty": values[:0], "b.c": values[0]}, tmp_path / "f.safetensors")
    file = SafetensorsFile(tmp_path / "f.safetensors")
    for name, expected in {"a": values, "empty": values[:0], "b.c": values[0]}.items():
        read = file.read(name)
        assert read.dtype == expected.dtype and read.shape == expected.shape
        assert read.tobytes() == expected.tobytes()


def test_written_files_are_read_by_the_library_and_say_format_pt(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    tensors = {
        "small": np.arange(3, dtype=np.uint8),  # odd size: everything after it would be unaligned if it came first
        "a": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32),
        "b": np.random.default_rng(1).normal(size=(2, 5)).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(2.5).reshape(()),
        "none": np.zeros((0, 4), np.float16),
    }
    path = tmp_path / "f.safetensors"
    write_safetensors(path, tensors, {"note": "x"})
    with safe_open(path, "pt") as file:
        assert {k: v for k, v in file.metadata().items() if k != CHECKSUMS} == {"format": "pt", "note": "x"}
        assert set(file.keys()) == set(tensors)
        for name, expected in tensors.items():
            read = file.get_tensor(name)
            assert tuple(read.shape) == expected.shape
            assert np.array_equal(read.to(torch.float32).numpy(), expected.astype(np.float32))
    assert [p.name for p in tmp_path.iterdir()] == ["f.safetensors"]


def test_arrays_that_are_not_contiguous_are_written_as_they_read(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    base = np.arange(6, dtype=np.float32).reshape(2, 3)
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    views = {"transposed": base.T, "square": square.T, "strided": square[::2, ::-1], "fortran": np.asfortranarray(base)}
    write_safetensors(tmp_path / "f.safetensors", views)
    for name, read in load_file(tmp_path / "f.safetensors").items():
        assert np.array_equal(read, views[name]), name


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    from fastjax.models.checkpoint.safetensors_io import LazyTensor

    path = tmp_path / "f.safetensors"
    write_safetensors(path, {"a": np.ones(3, np.float32)})

    def fail() -> np.ndarray:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_safetensors(path, {"a": LazyTensor((3,), np.dtype(np.float32), fail)})
    assert [p.name for p in tmp_path.iterdir()] == ["f.safetensors"]
    assert np.array_equal(read_safetensors(path)["a"], np.ones(3, np.float32))


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a has dtype complex64"):
        write_safetensors(tmp_path / "f", {"a": np.zeros(2, np.complex64)})


@pytest.mark.parametrize("first", ["safetensors.numpy", "numpy", "fastjax.models.checkpoint.safetensors_io"])
def test_bfloat16_is_read_in_any_order_of_imports(first: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "f.safetensors", {"a": np.array([1.0, 257.0], ml_dtypes.bfloat16)})
    code = (
        f"import {first}\n"
        "from fastjax.models.checkpoint.safetensors_io import read_safetensors\n"
        "a = read_safetensors('f.safetensors')['a']\n"
        "import sys; print(a.dtype.name, a.view('uint16').tolist(), 'jax' in sys.modules or 'torch' in sys.modules)"
    )
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.split("\n")[0] == "bfloat16 [16256, 17280] False"


def test_metadata_without_a_format_is_accepted(raw_safetensors: Callable) -> None:
    path = raw_safetensors({"a": entry([2], [0, 8])}, np.array([1, 2], np.float32).tobytes())
    assert read_safetensors(path)["a"].tolist() == [1.0, 2.0]


def test_an_unaligned_tensor_is_read(raw_safetensors: Callable) -> None:
    header = json.dumps({"u": entry([1], [0, 1], "U8"), "a": entry([2], [1, 9])}).encode()
    path = raw_safetensors(header, b"\x07" + np.array([1.5, -2], np.float32).tobytes())
    assert np.array(SafetensorsFile(path).read("a")).tolist() == [1.5, -2.0]


def test_a_tensor_that_has_changed_since_it_was_written_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    write_safetensors(path, {"a": np.arange(6.0), "none": np.zeros((0, 4)), "b": np.arange(5, dtype=np.int8)})
    checksums = SafetensorsFile(path).header.metadata[CHECKSUMS]
    assert checksums == f"{zlib.crc32(np.arange(6.0)):08x} 00000000 {zlib.crc32(np.arange(5, dtype=np.int8)):08x}"
    contents = path.read_bytes()
    path.write_bytes(contents[:-1] + b"\x05")
    np.testing.assert_array_equal(SafetensorsFile(path).read("a"), np.arange(6.0))
    with pytest.raises(UserError, match=r"f.safetensors: b is not as it was written"):
        SafetensorsFile(path).read("b")
    path.write_bytes(contents.replace(checksums.encode(), checksums[:-2].encode() + b"  "))
    with pytest.raises(UserError, match="f.safetensors .*does not have a checksum for every tensor"):
        SafetensorsFile(path)

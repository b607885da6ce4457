"""The header of a safetensors file, checked against the file's size before anything is mapped.

A safetensors file is an 8-byte little-endian length, a JSON object of that length, and the tensors' bytes. Each entry
is `{"dtype": name, "shape": [...], "data_offsets": [begin, end]}`, offsets counted from the end of the header; entries
cover the rest of the file without hole or overlap. `__metadata__` maps strings to strings.
Source: the format section of the safetensors project's README.
"""

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fastjax.errors import UserError

# 2 MiB hold some 15,000 tensors, three times those of a 4-bit model of 126 layers, and are parsed in a second.
MAX_HEADER_BYTES = 2 << 20

# ml_dtypes gives numpy its bfloat16 and float8; naming the classes keeps this independent of import order.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its type and where its bytes lie, counted from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """All entries of a file in the order of their bytes, and its string metadata."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(path: str | os.PathLike[str]) -> Header:
    """The checked header of the file at `path`.

    Raises: UserError naming the file and what is wrong with it: not a file, a length beyond the file, JSON that does
      not parse, a key given twice, an unknown dtype, a shape that does not fill its range, overlapping ranges.
    """
    path = Path(path)
    try:
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise _broken(path, "it is a folder, a pipe or a device, not a file")
        with open(path, "rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise _broken(path, f"it has {size} bytes, fewer than the 8 of the header length")
            length = int.from_bytes(start, "little")
            if length > size - 8:
                raise _broken(path, f"its header claims {length} bytes, and the file has {size}")
            if length > MAX_HEADER_BYTES:
                raise _broken(path, f"its header claims {length} bytes; at most {MAX_HEADER_BYTES} are read")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    fields = _parse(path, text)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "__metadata__ is not a map from strings to strings")
    base = 8 + length
    entries = {name: _entry(path, name, field, base) for name, field in fields.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = base
    for name, entry in entries.items():
        if entry.begin != position:
            kind = "overlap the tensor before" if entry.begin < position else "leave a hole after the tensor before"
            raise _broken(path, f"the bytes of {name} {kind}")
        position = entry.end
    if position != size:
        raise _broken(path, f"its tensors end at byte {position}, and the file has {size}; is the download complete?")
    return Header(path, entries, metadata)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise _broken(path, f"its header names {error.args[0]!r} twice") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, "its header is not JSON") from error
    if not isinstance(fields, dict):
        raise _broken(path, "its header is not a JSON object")
    return fields


class _DuplicateKey(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return result


def _entry(path: Path, name: str, field: Any, base: int) -> Entry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"the entry of {name} is not dtype, shape and data_offsets")
    shape, offsets = field["shape"], field["data_offsets"]
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(path, f"{name} has shape {shape} and data_offsets {offsets}")
    dtype = DTYPES.get(field["dtype"]) if isinstance(field["dtype"], str) else None
    if dtype is None:
        raise UserError(f"{path}: {name} has dtype {field['dtype']!r}; the ones read are {', '.join(DTYPES)}")
    held, needed = offsets[1] - offsets[0], math.prod(shape) * dtype.itemsize
    if held != needed:
        raise _broken(path, f"{name} of shape {shape} and dtype {field['dtype']} needs {needed} bytes and has {held}")
    return Entry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _counts(value: Any) -> bool:
    # bool is an int to Python, and True is no length.
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _broken(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is not a sound safetensors file: {reason}")

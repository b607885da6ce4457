"""The metadata and tensor table of a GGUF file, every count and offset checked against the file's size.

A GGUF file is `GGUF`, version, number of tensors, number of metadata entries; the entries (key, type, value); the
tensor table (name, dimensions with the fastest first, type, offset); and, from the next multiple of the alignment on,
the tensors' bytes. All numbers are little-endian.
Source: docs/gguf.md of the ggml project. The reader of the gguf package takes counts and offsets on trust, so a broken
file can keep it busy for ever; only its tables of types and its dequantisation are used here.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastjax.errors import UserError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
# Several times what any model has. Python needs some 50 bytes for a value: a wrong count may not ask for gigabytes.
_MAX_ENTRIES, _MAX_VALUES, _MAX_STRING_BYTES = 1 << 16, 1 << 21, 1 << 24


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the table. `shape` is in numpy's order, `kind` the gguf package's type name."""

    shape: tuple[int, ...]
    kind: str
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata values as Python numbers, strings and lists; tensors by their GGUF name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """The checked header of the GGUF file at `path`.

    Raises: UserError naming the file and what is wrong: not GGUF, another version or byte order, a count or offset
      beyond the file, a key or tensor given twice, a type that is not known.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a GGUF file: {error}") from error
    with data:
        return _Parser(path, data).header()


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._at = path, data, len(data), 0

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise self._broken("it does not start with the letters GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._broken(f"its version is {version}; 2 and 3 (little-endian) are read")
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        # An entry takes at least 13 bytes and a tensor 24: more of them than the file has room for is a lie.
        self._room(num_entries, 13, "metadata entries", _MAX_ENTRIES)
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise self._broken(f"its metadata has {key!r} twice")
            metadata[key] = self._value(self._scalar("I"), key)
        self._room(num_tensors, 24, "tensors", _MAX_ENTRIES)
        table = [self._table_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"its alignment is {alignment!r}, not a power of two")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in table:
            if name in tensors:
                raise self._broken(f"it has the tensor {name!r} twice")
            tensors[name] = self._tensor(name, shape, kind, base, offset)
        self._check_overlap(tensors)
        return GgufHeader(self._path, metadata, tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, base: int, offset: int) -> GgufTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quantization = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError):
            raise self._broken(f"{name} is of the unknown type {kind}") from None
        if 0 in shape:
            raise self._broken(f"{name} has the shape {list(shape)}, which holds nothing")
        if shape[-1] % block:
            raise self._broken(f"{name} has rows of {shape[-1]}, not a multiple of the {block} of {quantization.name}")
        num_bytes = math.prod(shape) // block * block_bytes
        if base + offset + num_bytes > self._size:
            raise self._broken(
                f"{name} ends at byte {base + offset + num_bytes}, and the file has {self._size}; "
                "is the download complete?"
            )
        return GgufTensor(shape, quantization.name, base + offset, num_bytes)

    def _check_overlap(self, tensors: dict[str, GgufTensor]) -> None:
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise self._broken(f"the bytes of {name} overlap those of {before}")
            end, before = tensor.begin + tensor.num_bytes, name

    def _table_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            raise self._broken(f"{name} has {num_dims} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
        return name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._broken(f"{key} is of the unknown type {kind}")
        element, count = self._scalar("I"), self._scalar("Q")
        if element in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[element])
            self._room(count, width, f"values of {key}", _MAX_VALUES)
            return list(struct.unpack(f"<{count}{_SCALARS[element]}", self._take(count * width)))
        if element != _STRING:
            raise self._broken(f"{key} is an array of type {element}, which is not read")
        self._room(count, 8, f"values of {key}", _MAX_VALUES)
        return [self._string() for _ in range(count)]

    def _string(self) -> str:
        length = self._scalar("Q")
        self._room(length, 1, "bytes of a text", _MAX_STRING_BYTES)
        # Vocabularies may hold pieces that are no whole characters.
        return self._take(length).decode("utf-8", errors="replace")

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise self._broken(f"it ends in its header: {count} bytes are claimed at byte {self._at} of {self._size}")
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def _room(self, count: int, width: int, what: str, most: int) -> None:
        if count * width > self._size - self._at:
            raise self._broken(f"it claims {count} {what}, more than its {self._size} bytes can hold")
        if count > most:
            raise self._broken(f"it claims {count} {what}; at most {most} are read")

    def _broken(self, reason: str) -> UserError:
        return UserError(f"{self._path} is not a sound GGUF file: {reason}")

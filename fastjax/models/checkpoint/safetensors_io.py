"""Tensors out of and into safetensors files, one at a time.

Reading maps one tensor's bytes and unmaps them with the array, so that a process never holds more of a file than the
tensor it works on. Writing streams: the header needs only names, shapes and dtypes, and each tensor is asked for when
its turn comes.

A file that is written here has the CRC-32 of every tensor in its metadata, and a tensor whose bytes have changed since
is refused when it is read. Other programs' files have none, and nothing in the format would tell.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastjax.errors import UserError
from fastjax.models.checkpoint.files import replace_file
from fastjax.models.checkpoint.safetensors_header import DTYPES, Header, read_header

# Metadata: checksums in eight hexadecimal digits, in the order of the tensors' bytes.
CHECKSUMS = "fastjax.crc32"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written whose values are fetched by `read()` when its turn comes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class SafetensorsFile:
    """One safetensors file, its header checked, its tensors mapped on demand."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.header: Header = read_header(path)
        self.path = self.header.path
        self._checksums = self._read_checksums()

    def names(self) -> list[str]:
        """Names of the tensors, in the order of their bytes."""
        return list(self.header.entries)

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as a read-only array over the mapped file, in the file's own dtype."""
        entry = self.header.entries[name]
        if entry.begin == entry.end:  # an empty range cannot be mapped
            return np.empty(entry.shape, entry.dtype)
        count = entry.end - entry.begin
        try:
            raw = np.memmap(self.path, np.uint8, mode="r", offset=entry.begin, shape=(count,))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} changed or went away while it was read: {error}") from error
        if name in self._checksums and zlib.crc32(raw.data) != self._checksums[name]:
            raise UserError(
                f"{self.path}: {name} is not as it was written; copy or make the file again (or, if another program "
                f"changed it on purpose, let that program leave {CHECKSUMS} out of the metadata)"
            )
        return np.asarray(raw).view(entry.dtype).reshape(entry.shape)

    def verify(self) -> None:
        """Raises: UserError naming the first tensor that is not as it was written."""
        for name in self._checksums:
            self.read(name)

    def _read_checksums(self) -> dict[str, int]:
        """{tensor: CRC-32 of its bytes}; empty for a file of another program."""
        text = self.header.metadata.get(CHECKSUMS)
        if text is None:
            return {}
        try:
            values = [int(part, 16) for part in text.split(" ")] if text else []
            return dict(zip(self.header.entries, values, strict=True))
        except ValueError:
            raise UserError(
                f"{self.path} is not a sound safetensors file: {CHECKSUMS} does not have a checksum for every tensor"
            ) from None


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All tensors of a small file (an adapter, say) as arrays of their own, in the file's dtypes.

    Raises: UserError if the file is not a sound safetensors file.
    """
    file = SafetensorsFile(path)
    return {name: np.array(file.read(name)) for name in file.names()}


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray | LazyTensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes `tensors` to `path`: under a temporary name first, flushed to the disk, then renamed.

    Every array is made C-contiguous, so that a transposed view is written as it reads. The metadata always holds
    `format: pt`, without which several versions of transformers refuse a file, and checksums.

    Args:
      tensors: name -> array or LazyTensor; widest dtype is laid first, which keeps every tensor aligned.
      metadata: further strings for `__metadata__`.
    Raises: UserError if a dtype has no safetensors name; OSError if the disk refuses.
    """
    for name, tensor in tensors.items():
        if np.dtype(tensor.dtype) not in _NAMES:
            raise UserError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold; cast it first")
    order = _order(tensors)
    # Filled in once the tensors, which are asked for one by one, have been written.
    blank = " ".join(["00000000"] * len(order))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {}), CHECKSUMS: blank}}
    position = 0
    for name in order:
        tensor = tensors[name]
        dtype = np.dtype(tensor.dtype)
        end = position + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replace_file(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        checksums = []
        for name in order:
            array = _bytes(name, tensors[name])
            checksums.append(f"{zlib.crc32(array.data):08x}")
            file.write(array.data)
        file.seek(8 + text.index(f'"{CHECKSUMS}":"'.encode()) + len(CHECKSUMS) + 4)
        file.write(" ".join(checksums).encode())


def read_all(tensors: Mapping[str, np.ndarray | LazyTensor]) -> None:
    """Asks for the tensors as `write_safetensors` does, and writes nothing."""
    for name in _order(tensors):
        _bytes(name, tensors[name])


def _order(tensors: Mapping[str, np.ndarray | LazyTensor]) -> list[str]:
    return sorted(tensors, key=lambda name: -np.dtype(tensors[name].dtype).itemsize)


def _bytes(name: str, tensor: np.ndarray | LazyTensor) -> np.ndarray:
    array = tensor.read() if isinstance(tensor, LazyTensor) else tensor
    assert array.shape == tuple(tensor.shape) and array.dtype == tensor.dtype, name
    # uint8, because a file cannot write bfloat16; its memory is written as it is, without another copy.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

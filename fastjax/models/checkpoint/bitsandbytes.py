"""bitsandbytes' 4-bit tensors in a safetensors folder, read and written byte for byte.

A quantised weight NAME is several tensors: NAME with the codes (any dtype, only the bytes count), NAME.absmax,
NAME.quant_map, with nested block scales NAME.nested_absmax and NAME.nested_quant_map, and a JSON object in the bytes of
NAME.quant_state.bitsandbytes__nf4 (or fp4).
Source: bitsandbytes 0.50, functional.py, QuantState.as_dict and from_dict.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastjax.errors import UserError
from fastjax.kernels.nf4 import QuantizedWeight, packed_shapes
from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES, NESTED_BLOCK_SIZE
from fastjax.models.checkpoint.checkpoint import PackedFormat, TensorInfo, TensorSource
from fastjax.models.checkpoint.safetensors_io import LazyTensor
from fastjax.models.host import to_host
from fastjax.models.quant_config import QUANT_TYPES
from fastjax.models.values import INT32_MAX, number, shown, whole

_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_COMPANION = re.compile(rf"(?P<weight>.+)\.(?:{'|'.join(_PARTS)}|quant_state\.bitsandbytes__\w+)")
_DTYPES = ("float32", "float16", "bfloat16")
_MOST_STATE_BYTES = 65536


@dataclass(frozen=True)
class _Packed:
    """One quantised weight: what its JSON object says."""

    file: Path
    format: PackedFormat
    shape: tuple[int, int]
    nested_offset: float | None


def has_packed_weights(source: TensorSource) -> bool:
    """Whether any tensor belongs to a 4-bit weight."""
    return any(_STATE in name or name.endswith(".absmax") for name in source.names())


class BitsandbytesSource:
    """A TensorSource in which the tensors of a 4-bit weight are one: `read` gives its QuantizedWeight, of numpy arrays.

    Everything that headers and the small JSON objects tell is checked here; no codes are read.

    Raises: UserError naming file and tensor for an unknown quant_type or block size, a missing part, a wrong number of
      bytes, another code table, or a part without its weight.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.describe = source.describe
        held = source.names()
        companions = {name: found["weight"] for name in held if (found := _COMPANION.fullmatch(name))}
        self._names = [name for name in held if name not in companions]
        for companion, weight in companions.items():
            if weight not in self._names:
                raise UserError(f"{source.info(companion).file}: {companion} belongs to {weight}, which is not there")
        self._packed = {weight: self._open(weight) for weight in dict.fromkeys(companions.values())}

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        packed = self._packed.get(name)
        if packed is None:
            return self._source.info(name)
        return TensorInfo(packed.shape, packed.format.dtype, packed.file, packed.format)

    def read(self, name: str) -> np.ndarray | QuantizedWeight:
        packed = self._packed.get(name)
        if packed is None:
            return self._source.read(name)
        fields = {"codes": self._bytes(name), "absmax": self._read(f"{name}.absmax")}
        if packed.format.nested:
            fields["nested_scale"] = self._read(f"{name}.nested_absmax")
            fields["nested_offset"] = np.array(packed.nested_offset, np.float32)
            fields["nested_table"] = self._read(f"{name}.nested_quant_map")
        expected = packed_shapes(packed.shape, nested=packed.format.nested)
        arrays = {field: fields[field].reshape(shape) for field, (shape, _) in expected.items()}
        absent: dict[str, Any] = dict.fromkeys(("nested_scale", "nested_offset", "nested_table"))
        return QuantizedWeight(
            **(absent | arrays),
            shape=packed.shape,
            quant_type=packed.format.quant_type,
            dtype=np.dtype(packed.format.dtype),
        )

    def _read(self, name: str) -> np.ndarray:
        array = self._source.read(name)
        assert isinstance(array, np.ndarray)
        return array

    def _bytes(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self._read(name)).reshape(-1).view(np.uint8)

    def _open(self, name: str) -> _Packed:
        source, held = self._source, set(self._source.names())
        file = source.info(name).file
        states = [f"{name}{_STATE}{quant_type}" for quant_type in QUANT_TYPES if f"{name}{_STATE}{quant_type}" in held]
        if not states:
            other = [key for key in held if key.startswith(f"{name}{_STATE}")]
            known = " or ".join(f"{name}{_STATE}{quant_type}" for quant_type in QUANT_TYPES)
            what = f"{other[0]} has an unknown quant_type" if other else f"{name} is 4-bit and has no quant_state"
            raise UserError(f"{file}: {what}; expected {known}")
        state = self._state(states[0])
        label = f"{file}: {states[0]}"
        quant_type = state.get("quant_type")
        if quant_type not in QUANT_TYPES or not states[0].endswith(str(quant_type)):
            raise UserError(f"{label}: quant_type={shown(quant_type)} is unknown; known: {', '.join(QUANT_TYPES)}")
        if state.get("blocksize") != BLOCK_SIZE:
            raise UserError(f"{label}: blocksize={shown(state.get('blocksize'))}; blocks of {BLOCK_SIZE} are read")
        dtype = str(state.get("dtype")).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise UserError(f"{label}: dtype={shown(dtype)} must be one of {', '.join(_DTYPES)}")
        sizes = state.get("shape")
        if not isinstance(sizes, list) or len(sizes) != 2:
            raise UserError(f"{label}: shape={shown(sizes)} must be [out, in]")
        num_out, num_in = (whole(size, f"{label}: shape") for size in sizes)
        nested = "nested_offset" in state
        if nested and state.get("nested_blocksize", NESTED_BLOCK_SIZE) != NESTED_BLOCK_SIZE:
            raise UserError(
                f"{label}: nested_blocksize={shown(state['nested_blocksize'])}; nested blocks of {NESTED_BLOCK_SIZE} "
                "are read"
            )
        offset = number(state["nested_offset"], f"{label}: nested_offset", -3e38, 3e38) if nested else None
        self._check_parts(name, (num_out, num_in), nested)
        table = self._read(f"{name}.quant_map")
        if not np.allclose(table, CODES[quant_type], rtol=0, atol=1e-6):
            raise UserError(f"{file}: {name}.quant_map is not the code table of {quant_type}; no other one is read")
        return _Packed(file, PackedFormat(quant_type, nested, dtype), (num_out, num_in), offset)

    def _state(self, name: str) -> Mapping[str, Any]:
        info = self._source.info(name)
        if math.prod(info.shape) > _MOST_STATE_BYTES:
            raise UserError(
                f"{info.file}: {name} has {math.prod(info.shape)} bytes; a JSON object of a few hundred is it"
            )
        try:
            state = json.loads(self._bytes(name).tobytes().rstrip(b"\0"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{info.file}: {name} holds no JSON: {str(error)[:100]}") from error
        if not isinstance(state, dict):
            raise UserError(f"{info.file}: {name} holds no JSON object")
        return state

    def _check_parts(self, name: str, shape: tuple[int, int], nested: bool) -> None:
        source, held = self._source, set(self._source.names())
        expected = packed_shapes(shape, nested=nested)
        file = source.info(name).file
        if math.prod(shape) > INT32_MAX:
            raise UserError(f"{file}: {name} has shape {list(shape)}, more than {INT32_MAX} elements")
        num_codes = math.prod(expected["codes"][0])
        info = source.info(name)
        num_bytes = math.prod(info.shape) * np.dtype(info.dtype).itemsize
        if num_bytes != num_codes:
            raise UserError(
                f"{file}: {name} holds {num_bytes} bytes; a 4-bit weight of shape {list(shape)} has {num_codes}"
            )
        parts: dict[str, tuple[int, str]] = {"quant_map": (16, "float32")}
        for part, field in (
            ("absmax", "absmax"),
            ("nested_absmax", "nested_scale"),
            ("nested_quant_map", "nested_table"),
        ):
            if field in expected:
                parts[part] = (math.prod(expected[field][0]), expected[field][1].name)
        for part, (size, dtype) in parts.items():
            key = f"{name}.{part}"
            if key not in held:
                raise UserError(f"{file} has no {key}, which the 4-bit weight {name} needs ({dtype}, {size} elements)")
            info = source.info(key)
            if math.prod(info.shape) != size or info.dtype != dtype:
                raise UserError(
                    f"{info.file}: {key} is {info.dtype} {list(info.shape)}; a 4-bit weight of shape {list(shape)} "
                    f"needs {dtype} [{size}]"
                )


def packed_tensors(
    name: str, shape: tuple[int, int], format: PackedFormat, read: Callable[[], QuantizedWeight]
) -> dict[str, LazyTensor]:
    """The tensors under which bitsandbytes keeps one 4-bit weight.

    Args:
      name: of the weight.
      read: fetches the weight; called here for the scales, which are kept (one byte in 33 with nested ones), and again
        for the codes when their turn comes.
    """
    expected = packed_shapes(shape, nested=format.nested)
    weight = read()
    state: dict[str, Any] = {
        "quant_type": format.quant_type, "blocksize": BLOCK_SIZE, "dtype": format.dtype, "shape": list(shape),
    }  # fmt: skip
    if format.nested:
        offset = float(np.asarray(weight.nested_offset))
        state |= {"nested_blocksize": NESTED_BLOCK_SIZE, "nested_dtype": "float32", "nested_offset": offset}
    small: dict[str, np.ndarray] = {
        f"{name}{_STATE}{format.quant_type}": np.frombuffer(json.dumps(state).encode(), np.uint8),
        f"{name}.quant_map": CODES[format.quant_type].astype(np.float32),
    }
    fields = {"absmax": ".absmax", "nested_scale": ".nested_absmax", "nested_table": ".nested_quant_map"}
    small |= {f"{name}{fields[k]}": to_host(getattr(weight, k)).reshape(-1) for k in fields if k in expected}
    tensors = {key: LazyTensor(value.shape, value.dtype, partial(_same, value)) for key, value in small.items()}
    flat = (math.prod(expected["codes"][0]), 1)
    tensors[name] = LazyTensor(flat, np.dtype(np.uint8), lambda: to_host(read().codes).reshape(flat))
    return tensors


def _same(array: np.ndarray) -> np.ndarray:
    return array

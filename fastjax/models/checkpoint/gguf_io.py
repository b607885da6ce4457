"""GGUF files of the llama architecture: names, layout and values as HF's Llama has them."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fastjax.errors import UserError
from fastjax.models.checkpoint.checkpoint import Checkpoint, TensorInfo
from fastjax.models.checkpoint.gguf_config import config_from_gguf, generation_config_from_gguf
from fastjax.models.checkpoint.gguf_header import GgufHeader, read_gguf_header

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")


def open_gguf(name: str, path: Path) -> Checkpoint:
    """Opens a GGUF file of the llama architecture as a Checkpoint with HF's names and config keys.

    Raises: UserError if the file is unsound or holds something other than a Llama.
    """
    header = read_gguf_header(path)
    factors = _dequantize(header, _ROPE_FREQS) if _ROPE_FREQS in header.tensors else None
    config = config_from_gguf(header, factors)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    source = GgufSource(header, heads)
    return Checkpoint(name, path.parent, config, generation_config_from_gguf(header.metadata), source, gguf=path)


class GgufSource:
    """The tensors of a GGUF file under HF's names, dequantised in float32 when they are read.

    llama.cpp's converter interleaves the two halves of every query and key head, because its rotation turns
    neighbouring rows where HF's turns rows half a head apart. Reading puts them back.
    """

    def __init__(self, header: GgufHeader, heads: dict[str, int]) -> None:
        self._header = header
        self._heads = heads
        self._names = {_hf_name(header, name): name for name in header.tensors if name != _ROPE_FREQS}

    def names(self) -> list[str]:
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._header.tensors[self._names[name]].shape, "float32", self._header.path)

    def read(self, name: str) -> np.ndarray:
        values = _dequantize(self._header, self._names[name])
        for projection, heads in self._heads.items():
            if f".{projection}." in name:
                return _uninterleave(values, heads)
        return values

    def describe(self) -> str:
        return str(self._header.path)


def _hf_name(header: GgufHeader, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise UserError(f"{header.path}: the tensor {name} has no place in a Llama")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _uninterleave(values: np.ndarray, heads: int) -> np.ndarray:
    """[heads * H, ...] with rows (pair, half) within a head -> rows (half, pair)."""
    half = values.shape[0] // heads // 2
    split = values.reshape(heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def _dequantize(header: GgufHeader, name: str) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor = header.tensors[name]
    kind = GGMLQuantizationType[tensor.kind]
    try:
        raw = np.memmap(header.path, np.uint8, mode="r", offset=tensor.begin, shape=(tensor.num_bytes,))
    except (OSError, ValueError) as error:
        raise UserError(f"{header.path} changed or went away while it was read: {error}") from error
    plain: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "F32": lambda bits: bits.view(np.float32),
        "F16": lambda bits: bits.view(np.float16).astype(np.float32),
        "F64": lambda bits: bits.view(np.float64).astype(np.float32),
    }
    rows = np.asarray(raw).reshape(*tensor.shape[:-1], -1)
    if tensor.kind in plain:
        return plain[tensor.kind](rows)
    try:
        return dequantize(rows, kind)
    except NotImplementedError:
        raise UserError(f"{header.path}: {name} is of type {tensor.kind}, which the gguf package cannot read") from None

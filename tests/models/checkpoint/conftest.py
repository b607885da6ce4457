"""Folders, files and tokenizers that the checkpoint tests share."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct as GGUF, where `make model` puts it or FASTJAX_SMOLLM2 says."""
    path = Path(os.environ.get("FASTJAX_SMOLLM2", ROOT / ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.is_file():
        pytest.skip(f"{path.name} is not here; `make model` fetches it, FASTJAX_SMOLLM2 names another place")
    return path


@pytest.fixture
def raw_safetensors(tmp_path: Path) -> Callable[..., Path]:
    """write(header, data=b"", length=None): a file with this header (bytes or JSON-able), as it stands."""

    def write(header: Any, data: bytes = b"", length: int | None = None) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / "raw.safetensors"
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
        return path

    return write


@pytest.fixture(scope="session")
def hf_folder(tiny_hf: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied Llama as transformers saves it, float32. Read only: tests that change it copy it."""
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    tiny_hf(tie_word_embeddings=False).save_pretrained(folder)
    return folder


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k: (half, pair) -> (pair, half) in every head."""
    half = rows.shape[0] // heads // 2
    return np.stack([rows.reshape(heads, 2, half, -1)[:, 0], rows.reshape(heads, 2, half, -1)[:, 1]], 2).reshape(
        rows.shape
    )


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """write(path, hf_model, kind="F32", **metadata): an HF Llama as the converter of llama.cpp writes it."""
    return _write_gguf


def _write_gguf(
    path: Path, hf_model: Any, kind: str = "F32", factors: np.ndarray | None = None, **metadata: Any
) -> Path:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q",
        "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
        "up_proj": "ffn_up", "down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm",
        "lm_head": "output",
    }  # fmt: skip
    config = hf_model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add("llama." + key.replace("__", "."), value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    quantization = GGMLQuantizationType[kind]
    for name, tensor in hf_model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        *path_parts, module, leaf = name.split(".")
        values = tensor.float().numpy()
        if module in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if module == "q_proj" else config.num_key_value_heads
            values = interleave(values, heads)
        layer = next((part for part in path_parts if part.isdigit()), None)
        ours = f"{names[module]}.{leaf}" if layer is None else f"blk.{layer}.{names[module]}.{leaf}"
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(ours, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(ours, quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

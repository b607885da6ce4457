"""GGUF files against transformers' own loader: every value, every type, the config; and files that are refused."""

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.config import ModelConfig
from fastjax.models.quant_config import QuantConfig
from fastjax.models.quantized import layer_weight
from fastjax.models.rope import inverse_frequencies

# Widths in whole blocks of 256, and unequal numbers of query and key heads.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
# Types that gguf reads and does not write: their blocks are filled at random.
READ_ONLY = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M",
             "IQ4_NL", "IQ4_XS"]  # fmt: skip


def state_of_transformers(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Every tensor that transformers' own GGUF loader makes of the file, and its model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}, model


def assert_same_tensors(path: Path) -> Any:
    theirs, model = state_of_transformers(path)
    source = open_checkpoint(str(path)).tensors
    assert set(theirs) - set(source.names()) <= {"lm_head.weight"}
    for name in source.names():
        values = source.read(name)
        assert values.dtype == np.float32 and source.info(name).shape == values.shape
        assert np.array_equal(values, theirs[name]), name
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_of_every_type_is_what_transformers_reads(
    kind: str, tiny_hf: Callable, write_gguf: Callable, tmp_path: Path
) -> None:
    assert_same_tensors(write_gguf(tmp_path / "m.gguf", tiny_hf(**WIDE, num_hidden_layers=1), kind))


@pytest.mark.parametrize("kind", READ_ONLY)
def test_types_that_only_others_write_are_read_as_the_gguf_package_does(
    kind: str, write_gguf: Callable, tiny_hf: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf.quants

    rng = np.random.default_rng(0)
    written: dict[tuple, np.ndarray] = {}

    def random_blocks(values: np.ndarray, quantization: Any) -> np.ndarray:
        raw = rng.integers(0, 60, gguf.quants.quant_shape_to_byte_shape(values.shape, quantization), np.uint8)
        written[values.shape] = raw
        return raw

    monkeypatch.setattr(gguf.quants, "quantize", random_blocks)
    path = write_gguf(tmp_path / "m.gguf", tiny_hf(**WIDE, num_hidden_layers=1), kind)
    read = open_checkpoint(str(path)).tensors.read("model.layers.0.mlp.down_proj.weight")
    expected = gguf.quants.dequantize(written[(256, 512)], gguf.GGMLQuantizationType[kind])
    assert read.shape == (256, 512) and np.array_equal(read, expected)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_file_that_is_quantised_while_it_loads_holds_what_bitsandbytes_makes_of_its_values(
    dtype: str, tiny_hf: Callable, write_gguf: Callable, tmp_path: Path
) -> None:
    import torch

    bnb = pytest.importorskip("bitsandbytes.functional")
    path = write_gguf(tmp_path / "m.gguf", tiny_hf(**WIDE, num_hidden_layers=2), "Q4_1")
    source = open_checkpoint(str(path)).tensors
    model = load_model(str(path), dtype, quantization=QuantConfig())
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        given = torch.tensor(source.read(f"model.layers.1.{name}.weight")).to(getattr(torch, dtype))
        codes, state = bnb.quantize_4bit(given, quant_type="nf4", compress_statistics=True)
        room, projection = name.split(".")
        weight = layer_weight(getattr(getattr(model.layers, room), projection).weight.get_value(), 1)
        np.testing.assert_array_equal(np.asarray(weight.codes).reshape(-1), codes.numpy().reshape(-1))
        np.testing.assert_array_equal(np.asarray(weight.absmax).reshape(-1), state.absmax.numpy())
        np.testing.assert_array_equal(weight.nested_scale, state.state2.absmax.numpy())
        assert weight.dtype.name == dtype and float(weight.nested_offset) == float(state.offset)


def test_query_and_key_rows_return_to_the_order_of_the_original_model(
    tiny_hf: Callable, write_gguf: Callable, tmp_path: Path
) -> None:
    hf_model = tiny_hf(attention_bias=True, mlp_bias=True, head_dim=12)
    path = write_gguf(tmp_path / "m.gguf", hf_model, attention__key_length=12, attention__value_length=12)
    source = open_checkpoint(str(path)).tensors
    for name, tensor in hf_model.state_dict().items():
        assert np.array_equal(source.read(name), tensor.numpy()), name  # biases and an explicit head size included
    ids = np.random.default_rng(0).integers(0, 99, (1, 40))
    import torch

    with torch.no_grad():
        expected = hf_model(torch.tensor(ids)).logits.numpy()
    assert np.abs(np.asarray(load_model(str(path), jnp.float32)(jnp.asarray(ids))) - expected).max() < 1e-4


def test_the_config_is_that_of_the_original_model(tiny_hf: Callable, write_gguf: Callable, tmp_path: Path) -> None:
    hf_model = tiny_hf(
        tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    config = ModelConfig.from_hf(open_checkpoint(str(write_gguf(tmp_path / "m.gguf", hf_model))).config)
    expected = ModelConfig.from_hf({**hf_model.config.to_dict(), "bos_token_id": None, "eos_token_id": None})
    assert config == expected


LLAMA3 = [
    {"factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"factor": 32.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"factor": 4.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 2048},
]


@pytest.mark.parametrize("parameters", LLAMA3)
def test_llama3_rope_is_recovered_from_its_factors(
    parameters: dict, tiny_hf: Callable, write_gguf: Callable, tmp_path: Path
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, **parameters}
    hf_model = tiny_hf(head_dim=64, rope_parameters=rope)
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](hf_model.config, "cpu")[0].numpy()
    plain = 1 / 5e5 ** (np.arange(0, 64, 2) / 64)
    path = write_gguf(tmp_path / "m.gguf", hf_model, factors=plain / frequencies)
    config = ModelConfig.from_hf(open_checkpoint(str(path)).config)
    ours = {key: getattr(config.rope, key) for key in parameters}
    assert ours == pytest.approx(parameters) and config.rope.rope_type == "llama3"
    assert np.allclose(inverse_frequencies(config.rope, 64), frequencies, rtol=1e-5)


def test_other_rope_factors_are_refused(tiny_hf: Callable, write_gguf: Callable, tmp_path: Path) -> None:
    for number, factors in enumerate(
        (np.linspace(1, 8, 32), np.linspace(1, 8, 16), np.full(32, np.nan), np.ones(32) / 2)
    ):
        path = write_gguf(tmp_path / f"{number}.gguf", tiny_hf(head_dim=64), factors=factors)
        with pytest.raises(UserError, match="rope_freqs.weight"):
            open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"rope__scaling__type": "none"}, {"rope_type": "default"}),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
    ],
)
def test_rope_scaling_keys_become_those_of_config_json(
    metadata: dict, rope: dict, tiny_hf: Callable, write_gguf: Callable, tmp_path: Path
) -> None:
    config = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", tiny_hf(), **metadata))).config
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **rope}
    ModelConfig.from_hf(config)


REFUSED = {
    "a mixture of experts": ({"expert_count": 8}, "llama.expert_count=8 is not handled"),
    "a scale on the logits": ({"logit_scale": 0.5}, "llama.logit_scale=0.5 is not handled"),
    "a rotation of a part of each head": ({"attention__key_length": 16}, "differs from the head size 16"),
    "a rope scaling that is not known": ({"rope__scaling__type": "longrope"}, "'longrope' is not handled"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_would_change_the_numbers_is_refused(
    case: str, tiny_hf: Callable, write_gguf: Callable, tmp_path: Path
) -> None:
    metadata, words = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", tiny_hf(), **metadata)
    with pytest.raises(UserError, match=words):
        open_checkpoint(str(path))


def test_a_dense_model_that_counts_zero_experts_is_read(
    tiny_hf: Callable, write_gguf: Callable, tmp_path: Path
) -> None:
    assert open_checkpoint(str(write_gguf(tmp_path / "m.gguf", tiny_hf(), expert_count=0))).config["hidden_size"] == 32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def file(*entries: bytes, tensors: tuple[bytes, ...] = (), counts: tuple | None = None, version: int = 3) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries) + b"".join(tensors)


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


LLAMA = text("general.architecture") + struct.pack("<I", 8) + text("llama")
BROKEN = {
    "nothing": (b"", "cannot be read"),
    "other letters": (b"GGML" + b"\0" * 60, "does not start with"),
    "another version": (file(version=1), "version is 1"),
    "big-endian": (file(version=3 << 24), "version is"),
    "half a header": (b"GGUF\x03\0\0\0\x01", "ends in its header"),
    "2^60 metadata entries": (file(LLAMA, counts=(0, 2**60)), "metadata entries, more than"),
    "2^60 tensors": (file(LLAMA, counts=(2**60, 1)), "tensors, more than"),
    "an array of 2^60 numbers": (file(text("a") + struct.pack("<IIQ", 9, 4, 2**60)), "values of a, more than"),
    "an array of 2^60 strings": (file(text("a") + struct.pack("<IIQ", 9, 8, 2**60)), "values of a, more than"),
    "an array of arrays": (file(text("a") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 16), "array of type 9"),
    "a string of 2^63": (file(text("a") + struct.pack("<IQ", 8, 2**63)), "bytes of a text, more than its"),
    "a value of no type": (file(text("a") + struct.pack("<I", 99)), "unknown type 99"),
    "a key twice": (file(LLAMA, LLAMA), "twice"),
    "a tensor twice": (file(LLAMA, tensors=(tensor("a", [1]), tensor("a", [1]))) + b"\0" * 64, "tensor 'a' twice"),
    "a tensor past the end": (file(LLAMA, tensors=(tensor("a", [2**40]),)) + b"\0" * 64, "a ends at byte"),
    "an offset past the end": (file(LLAMA, tensors=(tensor("a", [1], 0, 2**63),)) + b"\0" * 64, "a ends at byte"),
    "tensors that overlap": (
        file(LLAMA, tensors=(tensor("a", [8]), tensor("b", [8], 0, 16))) + b"\0" * 128, "b overlap those of a",
    ),
    "a row of half a block": (file(LLAMA, tensors=(tensor("a", [16], 2),)) + b"\0" * 64, "multiple of the 32 of Q4_0"),
    "a tensor of no type": (file(LLAMA, tensors=(tensor("a", [1], 999),)) + b"\0" * 64, "unknown type 999"),
    "a tensor of 2^31 dimensions": (
        file(LLAMA, tensors=(text("a") + struct.pack("<IQ", 2**31, 1),)) + b"\0" * 64, "2147483648 dimensions",
    ),
    "another architecture": (file(text("general.architecture") + struct.pack("<I", 8) + text("qwen2")), "'qwen2'"),
    "no sizes": (file(LLAMA), "llama.embedding_length=None"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_at_once(case: str, tmp_path: Path) -> None:
    content, words = BROKEN[case]
    (tmp_path / "m.gguf").write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(UserError, match=words) as caught:
        open_checkpoint(str(tmp_path / "m.gguf"))
    assert time.perf_counter() - start < 1.0
    assert "m.gguf" in str(caught.value)


def test_a_cut_off_file_and_a_tensor_without_a_place_are_refused(
    tiny_hf: Callable, write_gguf: Callable, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_hf())
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="is the download complete"):
        open_checkpoint(str(path))
    path.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(UserError, match="blk.1.ffn_xx.weight has no place in a Llama"):
        open_checkpoint(str(path))
    path.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(UserError, match=r"has no model.layers.1.mlp.up_proj.weight, expected shape \[48, 32\]"):
        load_model(str(path))


@pytest.mark.slow
def test_the_real_smollm2_is_what_transformers_reads(smollm2: Path) -> None:
    import torch

    hf_model = assert_same_tensors(smollm2)
    checkpoint = open_checkpoint(str(smollm2))
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    ids = np.random.default_rng(0).integers(0, 49152, (1, 48))
    with torch.no_grad():
        expected = hf_model(torch.tensor(ids)).logits.numpy()
    logits = load_model(checkpoint, jnp.float32)(jnp.asarray(ids))
    assert np.abs(np.asarray(logits) - expected).max() < 1e-3

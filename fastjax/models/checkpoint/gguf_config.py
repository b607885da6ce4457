"""From the metadata of a llama-architecture GGUF file to the keys of HF's config.json."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastjax.errors import UserError
from fastjax.models.checkpoint.gguf_header import GgufHeader

# Keys under "llama." that are read below, or that change no number: how the file was made or what it repeats.
_READ = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "tensor_data_layout",
})  # fmt: skip


# Relative; the factors are float32 quotients of float32 numbers.
_ROUNDING = 1e-4


def config_from_gguf(header: GgufHeader, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """HF's config.json for the file.

    Args:
      rope_factors: [H/2] float32, contents of rope_freqs.weight, by which llama.cpp divides the inverse frequencies;
        None if the file has no such tensor.
    Raises: UserError for another architecture, a missing size, a key of the architecture that is not handled, or
      rope factors that are not those of Llama 3.1.
    """
    path, metadata = header.path, header.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{path} is of architecture {architecture!r}; only 'llama' is read from GGUF")
    if metadata.get("split.count", 0) not in (0, 1):
        raise UserError(f"{path} is one part of {metadata['split.count']}; join them with llama-gguf-split --merge")
    values = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    # Counts of experts are written as 0 for a dense model; anything that is set has a meaning.
    unknown = sorted(key for key, value in values.items() if key not in _READ and value)
    if unknown:
        raise UserError(f"{path}: llama.{unknown[0]}={values[unknown[0]]!r} is not handled; is this a plain Llama?")

    def size(key: str, default: int | None = None) -> int:
        value = values.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one count a layer, all the same
        if type(value) is not int or value < 1:
            raise UserError(f"{path}: llama.{key}={value!r} must be a whole number of at least 1, for all layers")
        return value

    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", values.get("rope.dimension_count", hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if size(key, head_dim) != head_dim:
            raise UserError(f"{path}: llama.{key}={values[key]} differs from the head size {head_dim}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{path} has no token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise UserError(f"{path}: {len(tokens)} tokens, and token_embd.weight has {embedding.shape[0]} rows")
    window = values.get("attention.sliding_window")
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if window else "LlamaForCausalLM"],
        "model_type": "mistral" if window else "llama",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": _shortest(_number(path, values, "attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(path, values, head_dim, rope_factors),
        **_token_ids(metadata),
    }
    if window:
        config["sliding_window"] = size("attention.sliding_window")
    else:
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    return config


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """generation_config.json for the file: its begin, pad and end tokens, an end-of-turn token among the latter."""
    ids = _token_ids(metadata)
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    if not ends:
        return None
    return {**ids, "eos_token_id": ends if len(ends) > 1 else ends[0]}


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _rope(path: Any, values: Mapping[str, Any], head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    theta = _number(path, values, "rope.freq_base", 10000.0)
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    if factors is not None:
        if kind not in ("none", "llama3"):
            raise UserError(f"{path}: rope_freqs.weight together with llama.rope.scaling.type={kind!r} is not handled")
        return {"rope_theta": theta, **_llama3(path, theta, head_dim, factors, values)}
    factor = _number(path, values, "rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise UserError(f"{path}: llama.rope.scaling.type={kind!r} is not handled; none, linear and yarn are")
    out = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
    out["original_max_position_embeddings"] = values.get("rope.scaling.original_context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"rope.scaling.{theirs}" in values:
            out[ours] = _number(path, values, f"rope.scaling.{theirs}")
    if "rope.scaling.attn_factor" in values:
        # llama.cpp's is a factor on the usual magnitude, HF's takes its place.
        usual = 0.1 * math.log(factor) + 1.0
        out["attention_factor"] = usual * _number(path, values, "rope.scaling.attn_factor")
    return out


def _llama3(path: Any, theta: float, head_dim: int, factors: np.ndarray, values: Mapping[str, Any]) -> dict[str, Any]:
    """The Llama 3.1 parameters that give these factors.

    With f the inverse frequencies, 1/factors is 1 for high f, 1/F for low f, and in between
    (1 - s)/F + s with s = (original f / 2 pi - low) / (high - low): a straight line in f. Its slope and intercept fix
    original and high once low is chosen, and only the ratios of the three matter. Meta's low = 1 is taken.
    """
    factors = np.asarray(factors, np.float64)
    factor = float(factors.max(initial=1.0))
    frequencies = float(theta) ** -(np.arange(0, head_dim, 2) / head_dim)
    sound = factors.shape == frequencies.shape and np.all(np.isfinite(factors)) and factors.min() > 1 - _ROUNDING
    if not sound or factor < 1 + _ROUNDING:
        raise UserError(f"{path}: rope_freqs.weight does not hold {head_dim // 2} numbers of at least 1")
    candidates = [(8192.0, 4.0)]
    if isinstance(original := values.get("rope.scaling.original_context_length"), int):
        candidates.insert(0, (float(original), 4.0))
    between = (factors > 1 + _ROUNDING) & (factors < factor * (1 - _ROUNDING))
    if between.sum() >= 2:
        blend = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(frequencies[between], blend, 1)
        if intercept < 0 < slope:
            high = 1 - 1 / intercept
            candidates.append((slope * 2 * math.pi * (high - 1), high))
            candidates.append((float(round(candidates[-1][0])), float(round(high))))
    for original, high in sorted(candidates, key=lambda pair: pair[0] != round(pair[0])):
        if high > 1 and np.allclose(_llama3_factors(frequencies, factor, original, high), factors, rtol=_ROUNDING):
            return {
                "rope_type": "llama3",
                "factor": _shortest(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": float(high),
                "original_max_position_embeddings": round(original),
            }
    raise UserError(f"{path}: rope_freqs.weight is not the rescaling of Llama 3.1; no other one is handled")


def _llama3_factors(frequencies: np.ndarray, factor: float, original: float, high: float) -> np.ndarray:
    turns = original * frequencies / (2 * math.pi)
    blend = np.clip((turns - 1) / (high - 1), 0, 1)
    return 1 / ((1 - blend) / factor + blend)


def _number(path: Any, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UserError(f"{path}: llama.{key}={value!r} must be a number above 0")
    return float(value)


def _shortest(value: float) -> float:
    # A float32 such as 9.9999997e-06 was written as 1e-05: the shortest decimal that gives the same float32.
    return float(str(np.float32(value)))

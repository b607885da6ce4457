"""config.json of well-known models by name, for planning and measuring without a download.

Source: the config.json files that their makers publish.
"""

from collections.abc import Mapping
from typing import Any

from fastjax.errors import UserError

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(
    vocab: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, length: int, theta: float, **more: Any
) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rope_theta": theta,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": _llama(128256, 4096, 14336, 32, 32, 8, 8192, 500000.0),
    "llama3.1-8b": _llama(128256, 4096, 14336, 32, 32, 8, 131072, 500000.0, rope_scaling=_LLAMA3_ROPE),
    "llama3-70b": _llama(128256, 8192, 28672, 80, 64, 8, 8192, 500000.0),
    "llama2-7b": _llama(32000, 4096, 11008, 32, 32, 32, 4096, 10000.0),
    "mistral-7b": _llama(32768, 4096, 14336, 32, 32, 8, 32768, 1e6, model_type="mistral", sliding_window=None),
    "smollm2-135m": _llama(49152, 576, 1536, 30, 9, 3, 8192, 1e5, tie_word_embeddings=True),
}


def preset(name: str) -> dict[str, Any]:
    """The config.json of a known model. Raises: UserError for another name."""
    if name not in PRESETS:
        raise UserError(f"preset {name!r} is unknown; known: {', '.join(PRESETS)}")
    return dict(PRESETS[name])

"""Reading config.json: every spelling on people's disks, and refusal by name of what is not computed."""

import pytest

from fastjax.errors import UserError
from fastjax.models.config import ModelConfig

BASE = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA31}, "torch_dtype": "bfloat16"},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA31}, "dtype": "bfloat16"},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA31}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "llama3", **LLAMA31}},
    ],
)
def test_every_spelling_of_the_rotary_settings_is_read(spelling):
    rope = ModelConfig.from_hf({**BASE, "max_position_embeddings": 131072, **spelling}).rope
    assert (rope.rope_type, rope.rope_theta, rope.factor) == ("llama3", 500000.0, 8.0)
    assert rope.original_max_position_embeddings == 8192


def test_absent_keys_take_the_defaults_of_their_family():
    llama = ModelConfig.from_hf(BASE)
    assert not llama.tie_word_embeddings
    assert (llama.num_key_value_heads, llama.head_dim, llama.sliding_window) == (4, 8, None)
    assert (llama.rms_norm_eps, llama.rope.rope_theta, llama.max_position_embeddings) == (1e-6, 10000.0, 2048)
    mistral = ModelConfig.from_hf({**BASE, "model_type": "mistral", "num_attention_heads": 8})
    assert (mistral.num_key_value_heads, mistral.sliding_window) == (8, 4096)


def test_null_is_not_the_same_as_absent():
    config = {**BASE, "model_type": "mistral", "num_attention_heads": 16, "num_key_value_heads": None}
    assert ModelConfig.from_hf({**config, "sliding_window": None}).sliding_window is None
    assert ModelConfig.from_hf(config).num_key_value_heads == 16
    assert ModelConfig.from_hf({**config, "head_dim": None}).head_dim == 2


def test_end_of_sequence_may_be_one_id_or_several():
    assert ModelConfig.from_hf({**BASE, "eos_token_id": 2}).eos_token_id == (2,)
    assert ModelConfig.from_hf({**BASE, "eos_token_id": [1, 2]}).eos_token_id == (1, 2)


def test_a_real_llama_config_of_an_older_transformers_is_read():
    ModelConfig.from_hf({
        **BASE, "_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096, "num_key_value_heads": 4,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True,
        "attention_dropout": 0.0, "rope_interleaved": False, "is_llama_config": True,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; known: llama, mistral"),
        ({"model_type": None}, "model_type=None"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 must be 0"),
        ({"sliding_window": 128}, "sliding_window=128 is not handled"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs a number for 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1]}}, "unknown key 'short_factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": 33}, "hidden_size=33 is not a multiple"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a whole number"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, words):
    with pytest.raises(UserError, match=words):
        ModelConfig.from_hf({**BASE, **changes})

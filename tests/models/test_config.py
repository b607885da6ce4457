"""Reading config.json: every spelling on people's disks, and refusal by name of what is not computed."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastjax.errors import UserError
from fastjax.models import config as config_module
from fastjax.models import rope_keys
from fastjax.models.config import ModelConfig
from fastjax.models.rope import ROPE_TYPES, inverse_frequencies

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


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def rope(**parameters):
    return {"rope_parameters": parameters}


@pytest.mark.parametrize("absent", [{}, {"factor": None}])
def test_a_yarn_factor_that_is_not_given_is_the_ratio_of_the_two_lengths(absent):
    settings = {"rope_type": "yarn", "original_max_position_embeddings": 2048, **absent}
    assert ModelConfig.from_hf({**BASE, "max_position_embeddings": 8192, "rope_scaling": settings}).rope.factor == 4.0


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
        **BASE, "_name_or_path": "x", "_model_name_or_path": "x.gguf", "unk_token_id": 0,
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
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
        ({"quantization_config": "x"}, "quantization_config"),
        ({"model_type": []}, "model_type"),
        ({"model_type": {}}, "model_type"),
        *(({"eos_token_id": value}, "eos_token_id") for value in ("</s>", ["x"], [[1]], 10**30, 2.5, True, 128, -1)),
        ({"pad_token_id": [1]}, "pad_token_id"),
        ({"pad_token_id": 128}, "pad_token_id=128 must be a token id, a whole number from 0 to 127"),
        ({"bos_token_id": "<s>"}, "bos_token_id"),
        ({"num_experts": False}, "num_experts=False"),
        ({"layer_types": [{}]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types.*2 layers"),
        *(({"rope_theta": value}, "rope_theta") for value in ("abc", 0, -1, 1, True, math.inf)),
        *(({"rope_scaling": value}, "rope_scaling") for value in (0, "", [], "linear")),
        *((rope(rope_type="linear", factor=value), "factor") for value in (0, -2, math.inf, math.nan, True, "2")),
        (rope(**{**YARN, "original_max_position_embeddings": "x"}), "original_max_position_embeddings='x'"),
        (rope(**{**YARN, "original_max_position_embeddings": 0}), "original_max_position_embeddings=0"),
        (rope(**{**YARN, "beta_fast": "x"}), "beta_fast='x'"),
        (rope(**{**YARN, "beta_fast": 0}), "beta_fast=0"),
        (rope(**{**YARN, "beta_fast": 1, "beta_slow": 2}), "beta_slow=2.0 must not be above beta_fast=1.0"),
        (rope(**{**YARN, "truncate": 1}), "truncate=1"),
        (rope(rope_type="llama3", **{**LLAMA31, "factor": 0}), "factor=0"),
        (rope(rope_type="llama3", **{**LLAMA31, "high_freq_factor": 1.0}), "low_freq_factor=1.0 must be below"),
        ({**rope(rope_type="dynamic", factor=2), "head_dim": 2}, "head_dim=2 is too small"),
        *(({"rms_norm_eps": value}, "rms_norm_eps") for value in (-1e-6, math.nan, "1e-6")),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be .* at most 4096"),
        ({"hidden_size": 10**40}, "hidden_size"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, words):
    with pytest.raises(UserError, match=words):
        ModelConfig.from_hf({**BASE, **changes})


def test_layer_types_that_say_what_is_computed_anyway_are_read():
    ModelConfig.from_hf({**BASE, "layer_types": ["full_attention"] * 2})
    mistral = {**BASE, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8}
    ModelConfig.from_hf({**mistral, "layer_types": ["sliding_attention"] * 2})


def test_a_pad_token_of_minus_one_says_that_there_is_none():
    assert ModelConfig.from_hf({**BASE, "pad_token_id": -1}).pad_token_id is None


# Values of every JSON type, with the ones at the borders of our ranges more often.
EDGES = [True, False, None, 0, 1, 2, -1, 0.0, 1.0, 2.5, math.inf, -math.inf, math.nan, 1e-320, 10**30, "", "x", [], {}]
SCALARS = st.sampled_from(EDGES) | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=5
)
KEYS = sorted(
    config_module._COMMON_KEYS | config_module._NEUTRAL | set(config_module._FIXED)
    | {"sliding_window", "attention_bias", "mlp_bias", "auto_map", "quantization_config", "layer_types"}
)  # fmt: skip
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(ROPE_TYPES) | JSON, "factor": st.just(2.0) | JSON},
    optional={key: st.sampled_from([1, 2.0, 4096]) | JSON for key in sorted(rope_keys._KEYS - {"rope_type", "factor"})},
)
CHANGES = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(family=st.sampled_from(["llama", "mistral"]), changes=CHANGES, rope=st.none() | ROPE)
def test_any_json_value_under_any_key_is_read_or_refused_with_a_message(family, changes, rope):
    config = {**BASE, "model_type": family, "num_key_value_heads": 2, "rope_parameters": rope, **changes}
    try:
        read = ModelConfig.from_hf(config)
    except UserError as error:
        assert len(str(error)) < 700
        return
    inverse_frequencies(read.rope, min(read.head_dim, 64))
    assert math.isfinite(read.rope.magnitude())
    hash(read)
    assert json.loads(json.dumps(read.to_hf())).keys() >= {"model_type", "rope_parameters"}

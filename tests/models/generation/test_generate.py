"""Generation against transformers' own, on tiny random models in float32."""

import copy
import dataclasses
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import NumericsError, UserError
from fastjax.models.decoder import CausalLM
from fastjax.models.generation import _generate, _padded_batch, generate, length_limit, round_width
from fastjax.models.layers import Lora
from fastjax.models.rope import RopeConfig

NEW = 12
VOCAB = 99


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def torch_greedy(hf_model, prompt, num_new=NEW, eos=None):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        out = hf_model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_new, do_sample=False, eos_token_id=eos, pad_token_id=0,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def without_eos(hf_model):
    """The model's config would end rows at id 2; these tests choose their own ends."""
    hf_model.generation_config.eos_token_id = None
    return hf_model


@pytest.fixture(scope="module")
def llama(tiny_hf, from_hf_model):
    pytest.importorskip("torch")
    hf_model = without_eos(tiny_hf("llama", seed=1, scale=0.3))
    return hf_model, from_hf_model(hf_model)


PROMPTS = prompts_of(2, 6, 16)


@pytest.fixture(scope="module")
def expected(llama):
    return [torch_greedy(llama[0], prompt) for prompt in PROMPTS]


def test_greedy_batch_of_unequal_prompts_equals_transformers_one_by_one(llama, expected):
    assert generate(llama[1], PROMPTS, max_new_tokens=NEW) == expected
    assert len({tuple(row) for row in expected}) == 3


def test_rows_do_not_depend_on_their_order_or_company(llama, expected):
    assert generate(llama[1], PROMPTS[::-1], max_new_tokens=NEW) == expected[::-1]
    for prompt, row in zip(PROMPTS, expected, strict=True):
        assert generate(llama[1], [prompt], max_new_tokens=NEW) == [row]


VARIANTS = {
    "window": ("mistral", {"sliding_window": 5}),
    "one_kv_head_tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "head_dim_biases": ("llama", {"hidden_size": 30, "head_dim": 12, "num_attention_heads": 6, "num_key_value_heads": 2,
                                  "attention_bias": True, "mlp_bias": True}),
    "dynamic_rope": ("llama", {"max_position_embeddings": 20, "rope_parameters": {
        "rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_of_model_variants_equals_transformers(name, tiny_hf, from_hf_model):
    family, changes = VARIANTS[name]
    hf_model = without_eos(tiny_hf(family, seed=2, scale=0.3, **changes))
    model = from_hf_model(hf_model)
    # With "dynamic" a batch follows its longest row, so the rows that cross the border go alone.
    batches = [[prompt] for prompt in PROMPTS[2:]] if name == "dynamic_rope" else [PROMPTS]
    for batch in batches:
        assert generate(model, batch, max_new_tokens=NEW) == [torch_greedy(hf_model, prompt) for prompt in batch]


def test_long_prompts_pass_in_chunks(llama, tiny_hf, from_hf_model, monkeypatch):
    # Width 48 in chunks of gcd(48, 32) = 16; the rows end in different chunks.
    monkeypatch.setattr("fastjax.models.generation._CHUNK", 32)
    prompts = prompts_of(37, 3, 16, 17, seed=5)
    assert generate(llama[1], prompts, max_new_tokens=6) == [torch_greedy(llama[0], p, 6) for p in prompts]


def test_every_end_of_sequence_token_ends_its_row_and_is_kept(llama, expected):
    first, second = expected[0][3], expected[2][5]
    ended = generate(llama[1], PROMPTS, max_new_tokens=NEW, eos_token_ids=[first, second])
    for row, full in zip(ended, expected, strict=True):
        stops = [i for i, token in enumerate(full) if token in (first, second)]
        assert row == (full[: stops[0] + 1] if stops else full)
    assert len(ended[0]) <= 4 and len(ended[2]) <= 6
    # The very first token may end a row, and a row that ends leaves the others alone.
    assert generate(llama[1], PROMPTS, max_new_tokens=NEW, eos_token_ids=[expected[1][0]])[1] == expected[1][:1]


def test_padding_is_told_by_length_not_by_id(llama):
    # A prompt that ends in the padding id 0 is not shortened.
    prompt = [5, 0, 0]
    assert generate(llama[1], [prompt, PROMPTS[1]], max_new_tokens=4)[0] == torch_greedy(llama[0], prompt, 4)


def test_same_seed_same_text_at_any_batch_position(llama):
    settings = {"max_new_tokens": NEW, "temperature": 1.0, "top_k": 40, "top_p": 0.95}
    batch = generate(llama[1], [*PROMPTS, PROMPTS[0]], seed=7, **settings)
    assert batch[0] == batch[3]
    assert generate(llama[1], PROMPTS[::-1], seed=7, **settings)[::-1] == batch[:3]
    assert generate(llama[1], PROMPTS[1:2], seed=7, **settings) == batch[1:2]
    assert generate(llama[1], PROMPTS, seed=8, **settings) != batch[:3]


def test_first_token_is_drawn_from_the_model_s_distribution(llama):
    torch = pytest.importorskip("torch")
    hf_model, model = llama
    with torch.no_grad():
        p = (hf_model(torch.tensor([PROMPTS[1]])).logits[0, -1] / 0.7).softmax(-1).numpy()
    drawn = [generate(model, [PROMPTS[1]], max_new_tokens=1, temperature=0.7, seed=seed)[0][0] for seed in range(200)]
    top = int(np.argmax(p))
    assert abs(np.mean(np.array(drawn) == top) - p[top]) < 4 * np.sqrt(p[top] * (1 - p[top]) / 200) + 1e-9
    assert len(set(drawn)) > 5


def test_top_k_one_and_top_p_zero_are_greedy(llama, expected):
    assert generate(llama[1], PROMPTS, max_new_tokens=NEW, temperature=2.0, top_k=1, top_p=0.8) == expected
    assert generate(llama[1], PROMPTS, max_new_tokens=NEW, temperature=2.0, top_p=0.0) == expected


def test_a_row_stops_at_max_length_and_says_so(llama, expected):
    with pytest.warns(UserWarning, match="1 of 3 rows may stop before max_new_tokens=12: .* at most 22 tokens"):
        rows = generate(llama[1], PROMPTS, max_new_tokens=NEW, max_length=22)
    # Nothing was written over the last slot: what fits equals the run with a large cache.
    assert rows == [expected[0], expected[1], expected[2][:6]]


def test_the_whole_context_can_be_used(llama):
    prompt = prompts_of(60, seed=4)[0]
    with pytest.warns(UserWarning, match="at most 64 tokens"):
        rows = generate(llama[1], [prompt], max_new_tokens=NEW)
    assert rows == [torch_greedy(llama[0], prompt, 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(llama[1], [prompt[:63]], max_new_tokens=1) == [torch_greedy(llama[0], prompt[:63], 1)]


def test_calls_of_similar_size_share_a_compilation(llama, caplog):
    generate(llama[1], prompts_of(5, 9), max_new_tokens=9, temperature=0.5)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        generate(llama[1], prompts_of(16, 1, seed=3), max_new_tokens=16, temperature=1.5, seed=4, eos_token_ids=[1, 2])
        generate(llama[1], prompts_of(7, 11), max_new_tokens=12, temperature=0.9)
    assert not [r for r in caplog.records if "Compiling" in r.message and "_generate" in r.message]


def test_widths_are_few_and_waste_at_most_half():
    widths = sorted({round_width(n) for n in range(1, 2049)})
    assert widths == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    assert all(n <= round_width(n) <= max(16, 1.5 * n) for n in range(1, 2049))


def test_adapters_take_part_and_their_dropout_does_not(llama, from_hf_model):
    hf_model, _ = llama
    torch = pytest.importorskip("torch")
    adapted, merged = from_hf_model(hf_model), copy.deepcopy(hf_model)
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 0.3, (2, 4, 32)).astype(np.float32), rng.normal(0, 0.3, (2, 32, 4)).astype(np.float32)
    adapted.layers.self_attn.q_proj.lora = Lora(jnp.asarray(a), jnp.asarray(b), jnp.full(2, 2.0), dropout=0.5)
    for layer, module in enumerate(merged.model.layers):
        module.self_attn.q_proj.weight.data += torch.tensor(2.0 * b[layer] @ a[layer])
    rows = generate(adapted, PROMPTS, max_new_tokens=NEW)
    assert rows == [torch_greedy(merged, prompt) for prompt in PROMPTS]
    assert rows != generate(llama[1], PROMPTS, max_new_tokens=NEW)


def test_bfloat16_models_generate_what_their_own_forward_pass_says(llama, from_hf_model):
    model = from_hf_model(llama[0], dtype="bfloat16")
    rows = generate(model, PROMPTS, max_new_tokens=4)
    whole = [prompt + row for prompt, row in zip(PROMPTS, rows, strict=True)]
    padded = jnp.asarray([ids + [0] * (20 - len(ids)) for ids in whole])
    logits = np.asarray(jax.jit(lambda ids: model(ids))(padded))
    for prompt, row, row_logits in zip(PROMPTS, rows, logits, strict=True):
        for offset, token in enumerate(row):
            at = row_logits[len(prompt) - 1 + offset]
            # bfloat16 rounds differently in the two passes; near ties may fall either way.
            assert at[token] >= at.max() - 0.15


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([[5], []], {}, "prompt 1 has no tokens"),
        ([[5, 99]], {}, "prompt 0 has the token id 99, outside the model's vocabulary of 99"),
        ([[5, -1]], {}, "token id -1"),
        ([[5] * 64], {}, "prompt 0 has 64 tokens and rows hold at most 64"),
        ([[5] * 16], {"max_length": 16}, "prompt 0 has 16 tokens and rows hold at most 16.*shorten it to 15"),
        ([[5]], {"max_length": 65}, r"max_length=65 must lie in \[2, 64\]"),
        ([[5]], {"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number >= 1"),
        ([[5]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[5]], {"top_p": 1.5}, "top_p=1.5"),
        ([[5]], {"top_k": -2}, "top_k=-2"),
    ],
)
def test_bad_input_is_refused(llama, prompts, settings, words):
    with pytest.raises(UserError, match=words):
        generate(llama[1], prompts, **{"max_new_tokens": 4, **settings})


def test_nan_weights_are_an_error_not_text(llama, from_hf_model):
    model = from_hf_model(llama[0])
    model.norm.weight[...] = model.norm.weight[...] * jnp.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(NumericsError, match="NaN"):
            generate(model, PROMPTS, max_new_tokens=NEW, temperature=temperature)


def test_no_prompts_no_rows(llama):
    assert generate(llama[1], [], max_new_tokens=3) == []


def test_only_dynamic_scaling_stretches_beyond_max_position_embeddings(llama):
    config = llama[1].config
    dynamic = RopeConfig(rope_type="dynamic", factor=2.5, original_max_position_embeddings=64)
    assert length_limit(config) == 64
    assert length_limit(dataclasses.replace(config, rope=dynamic)) == 160
    assert length_limit(dataclasses.replace(config, rope=RopeConfig(rope_type="linear", factor=4.0))) == 64


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "f32"), ("bfloat16", "u16")])
def test_the_decoding_loop_writes_the_cache_in_place(llama, dtype, stored):
    """A copy or conversion of the whole cache in every step would make decoding slower with the cache's length."""
    graphdef, state = nnx.split(CausalLM.abstract(llama[1].config, dtype=jnp.dtype(dtype)))
    batch = _padded_batch(PROMPTS, 40, 64)
    shapes = {"cache_length": 61, "num_output": 45, "chunk": 512}
    text = _generate.lower(graphdef, state, batch, jnp.full(8, -1), None, **shapes).compile().as_text()
    computations = text.split("\n\n")
    assert len(computations) > 10 and f"{stored}[2,4,61,2,8]" in text
    made = [
        line for computation in computations if "ENTRY" not in computation
        for line in computation.splitlines() if "[2,4,61,2,8]" in line.partition(" = ")[2].partition("{")[0]
    ]  # fmt: skip
    assert made and not [line for line in made if " copy(" in line or " convert(" in line], made

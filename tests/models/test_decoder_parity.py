"""Logits and gradients of tiny random models against transformers: CPU, float32, every config variation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.models.cache import KVCache
from fastjax.models.config import ModelConfig

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

VARIATIONS = {
    "llama": ("llama", {}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "kv head per query head": ("llama", {"num_key_value_heads": 4}),
    "ratio 3, explicit head_dim": ("mistral", {"hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 2,
                                               "head_dim": 12}),
    "ratio 7": ("mistral", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 6}),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "eps": ("llama", {"rms_norm_eps": 1e-2}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "rope theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "rope dynamic": ("llama", {"max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "rope llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "rope yarn": ("llama", {"rope_parameters": YARN}),
    "rope yarn, attention_factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "rope yarn, mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
}  # fmt: skip


@pytest.fixture(scope="module")
def input_ids():
    return np.random.default_rng(0).integers(0, 99, (2, 33)).astype(np.int32)


@nnx.jit
def _logits(model, ids, **arguments):
    return model(ids, **arguments)


def _hf_logits(hf_model, input_ids):
    import torch

    with torch.no_grad():
        return hf_model(torch.tensor(input_ids, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("variation", VARIATIONS)
def test_logits_equal_transformers(variation, tiny_hf, from_hf_model, input_ids):
    family, changes = VARIATIONS[variation]
    hf_model = tiny_hf(family, **changes)
    model = from_hf_model(hf_model)
    expected = _hf_logits(hf_model, input_ids)
    actual = _logits(model, input_ids)
    assert actual.dtype == jnp.float32
    assert np.abs(actual - expected).max() <= 1e-4
    assert np.abs(expected).max() > 0.1  # else the comparison would say nothing


@pytest.mark.parametrize(
    ("family", "changes"),
    # A pad token that stands in the rows, as where pad and end-of-turn are one: torch leaves its embedding alone.
    [("llama", {"attention_bias": True, "mlp_bias": True, "pad_token_id": 7}), ("mistral", {"sliding_window": 5})],
)
def test_gradients_of_all_weights_equal_torch(family, changes, tiny_hf, from_hf_model, input_ids):
    import torch

    assert (input_ids == 7).any()
    hf_model = tiny_hf(family, **changes)
    ids = torch.tensor(input_ids, dtype=torch.long)
    hf_model(ids, labels=ids).loss.backward()
    model = from_hf_model(hf_model)
    graphdef, state = nnx.split(model)

    def loss(state):
        log_probabilities = jax.nn.log_softmax(nnx.merge(graphdef, state)(input_ids)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_probabilities, input_ids[:, 1:, None], -1))

    gradients = nnx.merge(graphdef, jax.jit(jax.grad(loss))(state))
    for name, parameter in hf_model.named_parameters():
        *path, leaf = name.removeprefix("model.").split(".")
        layer = int(path.pop(1)) if path[0] == "layers" else slice(None)
        module = gradients
        for attribute in path:
            module = getattr(module, attribute)
        ours, theirs = np.asarray(getattr(module, leaf)[...])[layer], parameter.grad.numpy()
        assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs), name


def test_every_remat_policy_gives_the_same_loss_and_gradients(tiny_hf, from_hf_model, input_ids):
    graphdef, state = nnx.split(from_hf_model(tiny_hf("llama")))

    def loss(state, remat, mlp_tokens):
        hidden = nnx.merge(graphdef, state).hidden_states(input_ids, remat=remat, mlp_tokens=mlp_tokens)
        return jnp.sum(jnp.sin(hidden))

    value_and_grad = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    expected = value_and_grad(state, "none", None)
    rows, length = input_ids.shape
    assert length % 5
    # The last in pieces of 5 tokens of each row, of which the last one is not full.
    for remat, mlp_tokens in (("full", None), ("attention", None), ("no_matmul", rows), ("full", 5 * rows)):
        actual = value_and_grad(state, remat, mlp_tokens)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def test_a_policy_saves_only_what_it_names(tiny_hf, from_hf_model, input_ids):
    graphdef, state = nnx.split(from_hf_model(tiny_hf("llama")))

    def saved_bytes(remat):
        def loss(state):
            return jnp.sum(nnx.merge(graphdef, state).hidden_states(input_ids, remat=remat))

        # What the forward hands to the backward, weights apart: the activations kept.
        _, backward = jax.vjp(loss, state)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(backward))

    sizes = [saved_bytes(remat) for remat in ("full", "attention", "no_matmul", "most", "none")]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 5
    # The forward of the layers that are compiled one by one hands on the same values.
    assert saved_bytes("unrolled,most") == sizes[3]


def test_segments_in_one_row_equal_rows_of_their_own(tiny_hf, from_hf_model, input_ids):
    model = from_hf_model(tiny_hf("llama"))
    segments = np.array([[1] * 12 + [2] * 20 + [0]] * 2)
    positions = np.array([[*range(12), *range(20), 0]] * 2)
    packed = _logits(model, input_ids, segment_ids=jnp.asarray(segments), positions=jnp.asarray(positions))
    np.testing.assert_allclose(packed[:, :12], _logits(model, input_ids[:, :12]), atol=1e-5)
    np.testing.assert_allclose(packed[:, 12:32], _logits(model, input_ids[:, 12:32]), atol=1e-5)


@pytest.mark.parametrize("variation", ["ratio 3, explicit head_dim", "mistral, window"])
def test_decoding_through_the_cache_equals_one_pass(variation, tiny_hf, from_hf_model, input_ids):
    family, changes = VARIATIONS[variation]
    model = from_hf_model(tiny_hf(family, **changes))
    cache = KVCache.create(model.config, 2, 40, jnp.float32)
    first, cache = _logits(model, input_ids[:, :20], cache=cache)
    positions = jnp.broadcast_to(jnp.arange(20, 33), (2, 13))
    second, _ = _logits(model, input_ids[:, 20:], cache=cache, positions=positions)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), _logits(model, input_ids), atol=1e-5)


def test_bfloat16_model_keeps_float32_where_it_matters(tiny_hf, from_hf_model):
    """Activations are bfloat16; norms' statistics and rotary angles are not."""
    from fastjax.models.layers import RMSNorm

    model = from_hf_model(tiny_hf("llama"), dtype="bfloat16")
    hidden = nnx.jit(lambda model, ids: model.hidden_states(ids))(model, jnp.zeros((1, 8), int))
    assert hidden.dtype == jnp.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.9  # not rounded on the way
    norm = RMSNorm(16, eps=1e-6)
    large = norm(jnp.full((1, 16), 300.0, jnp.float16))  # 300^2 overflows float16
    assert large.dtype == jnp.float16
    np.testing.assert_allclose(large.astype(np.float32), 1.0, atol=1e-3)


def test_rms_norm_eps_counts():
    from fastjax.models.layers import RMSNorm

    row = jnp.full((1, 16), 1e-3)
    small, large = (RMSNorm(16, eps=eps)(row)[0, 0] for eps in (1e-6, 1e-5))
    np.testing.assert_allclose([small, large], [1 / np.sqrt(2), 1 / np.sqrt(11)], rtol=1e-5)


def test_config_written_for_a_model_gives_the_same_model_back(tiny_hf):
    from transformers import AutoConfig

    for family, changes in VARIATIONS.values():
        config = ModelConfig.from_hf(tiny_hf(family, **changes).config.to_dict())
        written = config.to_hf()
        assert ModelConfig.from_hf(written) == config
        theirs = AutoConfig.for_model(**written)
        assert ModelConfig.from_hf(theirs.to_dict()) == config

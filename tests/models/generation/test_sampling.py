"""Sampling: the edges by hand, and kept sets and probabilities against transformers' logits processors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.models.sampling import check_sampling, filter_logits, greedy, is_greedy, row_rngs, sample

HALVES = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))


def kept(logits, **settings):
    return np.isfinite(np.asarray(filter_logits(jnp.asarray(logits), **settings)))


@pytest.mark.parametrize(
    ("top_p", "num_kept"),
    [(0.0, 1), (1e-8, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.88, 4), (1.0, 4)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it_and_never_none(top_p, num_kept):
    assert kept(HALVES, top_p=top_p).tolist() == [[True] * num_kept + [False] * (4 - num_kept)]


def test_top_p_counts_the_mass_that_top_k_left():
    # Of 0.5, 0.25 alone the first has 2/3: enough for 0.6, not for 0.7. Without renormalising 0.5 would need two.
    assert kept(HALVES, top_k=2, top_p=0.6).sum() == 1
    assert kept(HALVES, top_k=2, top_p=0.7).sum() == 2
    assert kept(HALVES, top_p=0.6).sum() == 2


def test_equal_scores():
    tied = np.array([[1.0, 3.0, 3.0, 2.0, 2.0, 0.0]], np.float32)
    assert kept(tied, top_k=3).tolist() == [[False, True, True, True, True, False]]
    assert kept(tied, top_p=1e-8).tolist() == [[False, True, False, False, False, False]]
    rngs = row_rngs(jax.random.key(0), jnp.arange(50))
    drawn = sample(jnp.tile(tied, (50, 1)), rngs, top_k=1)
    assert set(drawn.tolist()) == {1} == set(greedy(jnp.asarray(tied)).tolist())


@pytest.mark.parametrize("settings", [
    {"temperature": 0.0}, {"temperature": 0}, {"temperature": 5.0, "top_k": 1, "top_p": 0.8}, {"top_p": 0.0},
    {"temperature": 1e-30}, {"temperature": 2.0, "top_p": 1e-8},
])  # fmt: skip
def test_settings_that_leave_one_token_are_greedy(settings):
    logits = jax.random.normal(jax.random.key(1), (40, 33)) * 3
    drawn = sample(logits, row_rngs(jax.random.key(2), jnp.arange(40)), **settings)
    np.testing.assert_array_equal(drawn, jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, None, None), (1.0, 5, None), (1.3, 0, 0.9), (0.8, 20, 0.5), (2.0, 999, 0.999), (1.0, 7, 1.0), (0.1, 3, 0.3)],
)
def test_kept_tokens_and_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    torch = pytest.importorskip("torch")
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(0).normal(0, 3, (16, 257)).astype(np.float32)
    theirs = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits))
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p is not None and top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = filter_logits(jnp.asarray(logits), temperature=temperature, top_k=top_k, top_p=top_p)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs.numpy()))
    np.testing.assert_allclose(jax.nn.softmax(ours), theirs.softmax(-1).numpy(), atol=1e-6)
    # The compiled loop of generation passes the settings as arrays.
    traced = {k: None if v is None else jnp.asarray(v) for k, v in (("top_k", top_k), ("top_p", top_p))}
    compiled = jax.jit(filter_logits)(jnp.asarray(logits), temperature=jnp.float32(temperature), **traced)
    np.testing.assert_array_equal(np.isfinite(compiled), np.isfinite(ours))


def test_draws_follow_the_probabilities():
    rngs = row_rngs(jax.random.key(3), jnp.arange(20000))
    drawn = sample(jnp.tile(HALVES, (20000, 1)), rngs, temperature=1.0)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 20000, [0.5, 0.25, 0.125, 0.125], atol=0.015)


def test_bfloat16_logits_are_filtered_in_float32():
    scores = filter_logits(jnp.asarray(HALVES, jnp.bfloat16), temperature=0.9, top_p=0.9)
    assert scores.dtype == jnp.float32


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((-0.1, None, None), "temperature=-0.1 must be a number >= 0"),
        ((float("nan"), None, None), "temperature=nan"),
        ((1.0, -1, None), "top_k=-1 must be a whole number >= 0"),
        ((1.0, 2.5, None), "top_k=2.5"),
        ((1.0, None, 1.01), r"top_p=1.01 must lie in \[0, 1\]"),
        ((1.0, None, -0.5), "top_p=-0.5"),
        ((1.0, None, float("nan")), "top_p=nan"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        check_sampling(*settings)
    with pytest.raises(UserError, match=words):
        temperature, top_k, top_p = settings
        sample(HALVES, row_rngs(jax.random.key(0), jnp.arange(1)), temperature=temperature, top_k=top_k, top_p=top_p)


def test_what_counts_as_greedy():
    assert is_greedy(0.0) and is_greedy(0.7, top_k=1) and is_greedy(1.0, None, 0.0)
    assert not is_greedy(0.7) and not is_greedy(1.0, 0, 1.0)

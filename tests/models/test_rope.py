"""Inverse frequencies, magnitudes and angles against figures worked out by hand and by transformers' rules."""

import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.models.rope import RopeConfig, apply_rope, inverse_frequencies, rope_tables

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("factor", [4, 4.0])
def test_linear_divides_every_frequency(factor):
    rope = RopeConfig(rope_type="linear", factor=factor)
    np.testing.assert_allclose(inverse_frequencies(rope, 8), [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "magnitude"),
    [
        ({}, 1.1386294),
        ({"attention_factor": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_yarn_magnitude(changes, magnitude):
    assert RopeConfig(**{**YARN, **changes}).magnitude() == pytest.approx(magnitude, abs=1e-7)


def test_yarn_frequencies():
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(**YARN), 8), [1, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_angles_are_float32_whatever_the_model_computes_in():
    # In bfloat16 257 is 256 and 15962 is 15936, whose cosine at frequency 1 would be -0.2680.
    positions = jnp.array([[255, 256, 257, 260, 4095, 15962]])
    cos, sin = rope_tables(RopeConfig(), 8, positions)
    assert cos.dtype == jnp.float32
    exact = np.cos(np.asarray(positions[0], np.float64))
    np.testing.assert_allclose(cos[0, :, 0], exact, atol=1e-3)
    assert cos[0, 5, 0] == pytest.approx(-0.9080, abs=1e-3)
    x = jnp.ones((1, 6, 1, 8), jnp.bfloat16)
    rotated = apply_rope(x, cos, sin)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_allclose(rotated[0, :, 0, 0].astype(np.float32), cos[0, :, 0] - sin[0, :, 0], atol=8e-3)
    assert rotated[0, 1, 0, 0] != rotated[0, 2, 0, 0]


def test_dynamic_ignores_padding_when_it_reads_the_length():
    rope = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16)
    positions = jnp.arange(40)[None]
    short, _ = rope_tables(rope, 8, positions, positions < 10)
    plain, _ = rope_tables(RopeConfig(), 8, positions)
    np.testing.assert_allclose(short[:, :10], plain[:, :10], atol=1e-6)
    long, _ = rope_tables(rope, 8, positions, positions < 30)
    assert np.abs(long[:, :10] - plain[:, :10]).max() > 1e-2


@pytest.mark.parametrize(
    ("rope", "head_dim", "words"), [(RopeConfig(), 7, "head_dim=7"), (RopeConfig(rope_type="longrope"), 8, "longrope")]
)
def test_what_cannot_be_computed_is_refused(rope, head_dim, words):
    with pytest.raises(UserError, match=words):
        inverse_frequencies(rope, head_dim)

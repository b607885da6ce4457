"""attention against softmax written out in float64 with numpy loops over the mask's definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.attention import attention


def _float64(query, key, value, allowed, scale, softcap=None):
    """allowed: [B, T, S] bool. One head at a time, one query at a time."""
    batch, num_queries, num_heads, head_dim = query.shape
    group = num_heads // key.shape[2]
    out = np.zeros(query.shape, np.float64)
    for b in range(batch):
        for n in range(num_heads):
            for t in range(num_queries):
                seen = np.flatnonzero(allowed[b, t])
                if seen.size == 0:
                    continue
                scores = key[b, seen, n // group].astype(np.float64) @ query[b, t, n].astype(np.float64) * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = (weights / weights.sum()) @ value[b, seen, n // group].astype(np.float64)
    return out


def _attend(*arrays, **settings):
    """One compilation in place of one an operation."""
    return jax.jit(lambda *x: attention(*x, **settings))(*arrays)


def _inputs(batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, num_queries, num_heads, head_dim), *[(batch, num_keys, num_kv_heads, head_dim)] * 2]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "num_heads", "num_kv_heads", "head_dim", "options"),
    [
        (17, 17, 4, 2, 8, {}),
        (17, 17, 7, 1, 12, {"causal": False}),
        (9, 9, 6, 2, 12, {"window": 3}),
        (9, 9, 6, 2, 12, {"window": 1}),
        (9, 9, 3, 3, 8, {"window": 3, "causal": False}),
        (5, 13, 4, 4, 8, {}),
        (13, 13, 4, 2, 8, {"softcap": 1.5, "scale": 0.7}),
    ],
)
def test_equals_float64_softmax(num_queries, num_keys, num_heads, num_kv_heads, head_dim, options):
    query, key, value = _inputs(2, num_queries, num_keys, num_heads, num_kv_heads, head_dim)
    t, s = np.arange(num_queries)[:, None] + num_keys - num_queries, np.arange(num_keys)[None, :]
    allowed = (s <= t) if options.get("causal", True) else np.ones((num_queries, num_keys), bool)
    if (window := options.get("window")) is not None:
        allowed = allowed & (np.abs(t - s) < window)
    allowed = np.broadcast_to(allowed, (2, *allowed.shape))
    scale = options.get("scale", head_dim**-0.5)
    expected = _float64(query, key, value, allowed, scale, options.get("softcap"))
    np.testing.assert_allclose(_attend(query, key, value, **options), expected, atol=2e-6)


def test_segments_do_not_see_each_other_and_lengths_mask_the_tail():
    query, key, value = _inputs(2, 8, 8, 2, 1, 8)
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
    lengths = np.array([6, 7])
    causal = np.tril(np.ones((8, 8), bool))
    allowed = (segments[:, :, None] == segments[:, None, :]) & causal & (np.arange(8) < lengths[:, None, None])
    out = _attend(query, key, value, segment_ids=jnp.asarray(segments), kv_lengths=jnp.asarray(lengths))
    np.testing.assert_allclose(out, _float64(query, key, value, allowed, 8**-0.5), atol=2e-6)


def test_positions_place_queries_among_the_keys_of_a_cache():
    query, key, value = _inputs(2, 1, 10, 2, 2, 8)
    positions = np.array([[3], [8]])
    allowed = np.arange(10)[None, None, :] <= positions[:, :, None]
    out = _attend(query, key, value, positions=jnp.asarray(positions))
    np.testing.assert_allclose(out, _float64(query, key, value, allowed, 8**-0.5), atol=2e-6)


def test_a_query_without_keys_gives_zeros_and_zero_gradients():
    query, key, value = _inputs(1, 4, 4, 2, 2, 8)
    lengths = jnp.array([0])

    @jax.jit
    def run(*arrays):
        out, vjp = jax.vjp(lambda *x: attention(*x, kv_lengths=lengths), *arrays)
        return out, vjp(jnp.ones_like(out))

    out, gradients = run(query, key, value)
    for array in (out, *gradients):
        np.testing.assert_array_equal(array, 0)


def test_a_masked_key_cannot_win_whatever_its_score():
    query = jnp.full((1, 2, 1, 1), -20000.0)
    key = jnp.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    value = jnp.array([1.0, 100.0]).reshape(1, 2, 1, 1)
    out = _attend(query[:, :1], key, value, kv_lengths=jnp.array([1]), causal=False, scale=1.0)
    assert float(out[0, 0, 0, 0]) == 1.0


def test_output_has_the_query_dtype_and_softmax_is_float32():
    query, key, value = (x.astype(jnp.bfloat16) for x in _inputs(1, 64, 64, 2, 1, 16))
    out = _attend(query, key, value)
    assert out.dtype == jnp.bfloat16
    exact = _attend(*(x.astype(jnp.float32) for x in (query, key, value)))
    np.testing.assert_allclose(out.astype(np.float32), exact, atol=2e-2)

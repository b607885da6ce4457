"""Masks that arrays make, soft caps, dropout, log-sum-exps, poisoned memory: kernels and reference against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.attention import attention
from fastjax.kernels.attention.dropout import dropout_seeds, index_bits, keep


def inputs(batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim=40, seed=0):
    rng = np.random.default_rng(seed)
    heads = [(num_queries, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads), (num_queries, num_heads)]
    return [rng.standard_normal((batch, length, n, head_dim)).astype(np.float32) for length, n in heads]


def run(query, key, value, dout, dlse=None, **settings):
    """out, lse and the three gradients."""

    @jax.jit
    def call(query, key, value, dout, dlse):
        (out, lse), vjp = jax.vjp(lambda *x: attention(*x, return_lse=True, **settings), query, key, value)
        return out, lse, *vjp((dout, dlse))

    batch, num_queries, num_heads, _ = query.shape
    return call(query, key, value, dout, jnp.zeros((batch, num_heads, num_queries)) if dlse is None else dlse)


def agree(found, expected):
    for one, two in zip(found, (expected.out, expected.lse, *expected.gradients), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-5)


@pytest.fixture(params=["reference", "pallas_triton"])
def settings(request, interpret):
    if request.param == "reference" and not interpret:
        pytest.skip("runs once")
    return {"implementation": request.param, "interpret": interpret}


def causal(positions, num_keys):
    return np.arange(num_keys) <= np.asarray(positions)[..., None]


def test_lengths_mask_the_tail_whatever_it_holds_and_lse_has_a_gradient(exact, settings):
    query, key, value, dout = inputs(3, 37, 90, 6, 2)
    lengths = np.array([0, 60, 90])
    dlse = np.random.default_rng(1).standard_normal((3, 6, 37)).astype(np.float32)
    for row, length in enumerate(lengths):
        key[row, length:], value[row, length:] = np.nan, np.nan
    allowed = causal(np.arange(37)[None] + 53, 90) & (np.arange(90) < lengths[:, None, None])
    dlse[~allowed.any(-1)[:, None].repeat(6, 1)] = 0
    found = run(query, key, value, dout, dlse, kv_lengths=jnp.asarray(lengths), **settings)
    clean = [np.nan_to_num(x) for x in (key, value)]
    agree(found, exact(query, *clean, dout, allowed, 40**-0.5, dlse=dlse))
    for x in (found[0][0], *(x[0] for x in found[2:])):
        np.testing.assert_array_equal(x, 0)


def test_positions_place_queries_and_a_soft_cap_bends_scores(exact, settings):
    query, key, value, dout = inputs(2, 35, 90, 4, 4)
    positions = np.stack([np.arange(35) + 3, np.random.default_rng(0).permutation(35) * 2])
    allowed = causal(positions, 90) & (np.arange(90) > positions[..., None] - 9)
    found = run(query, key, value, dout, positions=jnp.asarray(positions), window=9, softcap=1.5, scale=0.4, **settings)
    agree(found, exact(query, key, value, dout, allowed, 0.4, softcap=1.5))


def test_segments_in_pieces_and_in_any_order(exact, settings):
    query, key, value, dout = inputs(2, 150, 150, 3, 1)
    ids = np.array([[7] * 40 + [2] * 30 + [7] * 20 + [0] * 10 + [-1] * 50, [0] * 5 + [1] * 145])
    allowed = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] != 0) & causal(np.arange(150)[None], 150)
    found = run(query, key, value, dout, segment_ids=jnp.asarray(ids), **settings)
    agree(found, exact(query, key, value, dout, allowed, 40**-0.5))


def test_dropout_is_a_function_of_global_indices(exact, settings):
    query, key, value, dout = inputs(2, 70, 70, 4, 2)
    rng, rate = jax.random.key(3), 0.3
    seeds = np.asarray(dropout_seeds(rng, 2, 4))
    words = [index_bits(jnp.asarray(seeds[..., i, None]), jnp.arange(70)) for i in range(2)]
    kept = np.asarray(keep(words[0][..., :, None], words[1][..., None, :], rate)) / (1 - rate)
    found = run(query, key, value, dout, dropout_rate=rate, rng=rng, **settings)
    allowed = np.broadcast_to(causal(np.arange(70)[None], 70), (2, 70, 70))
    agree(found, exact(query, key, value, dout, allowed, 40**-0.5, kept=kept))


def test_dropout_bits_look_random():
    seeds = dropout_seeds(jax.random.key(0), 2, 3)
    assert len(np.unique(np.asarray(seeds))) == seeds.size
    query_bits = index_bits(seeds[..., :1], jnp.arange(512))[..., :, None]
    key_bits = index_bits(seeds[..., 1:], jnp.arange(512))[..., None, :]
    kept = np.asarray(keep(query_bits, key_bits, 0.25), np.float64)
    # Standard errors: 512 * 512 draws a head, 512 a row or column, 6 heads.
    assert abs(kept.mean() - 0.75) < 5 * np.sqrt(0.1875 / kept.size)
    for axis in (-1, -2):
        assert np.abs(kept.mean(axis) - 0.75).max() < 5 * np.sqrt(0.1875 / 512)
    centred = (kept - 0.75).reshape(-1, 512)
    for shift in (1, 2, 32):
        assert abs((centred[:, :-shift] * centred[:, shift:]).mean()) < 5 * 0.1875 / np.sqrt(centred.size)
        assert abs((centred[:-shift] * centred[shift:]).mean()) < 5 * 0.1875 / np.sqrt(centred.size)


@pytest.mark.parametrize("masks", ["causal", "segments"])
def test_neighbours_in_memory_never_leak(exact, masks, settings):
    """Rows and heads beside this one hold NaN; 61 queries end inside a tile."""
    ids = jnp.asarray(np.repeat([1, 2, 3], [20, 21, 20])[None]) if masks == "segments" else None
    alone = inputs(1, 61, 61, 1, 1)
    poisoned = [np.full((3, 61, 3, 40), np.nan, np.float32) for _ in alone]
    for array, one in zip(poisoned, alone, strict=True):
        array[1, :, 1] = one[0, :, 0]
    for_three = None if ids is None else jnp.repeat(ids, 3, axis=0)
    out, lse, *gradients = run(*poisoned, segment_ids=for_three, **settings)
    allowed = causal(np.arange(61)[None], 61)
    if ids is not None:
        allowed &= np.asarray(ids[:, :, None] == ids[:, None, :])
    found = (out[1:2, :, 1:2], lse[1:2, 1:2], *(x[1:2, :, 1:2] for x in gradients))
    agree(found, exact(*alone, allowed, 40**-0.5))


@pytest.mark.parametrize(("num_queries", "window"), [(1, None), (1, 30), (5, None), (16, 70)])
def test_few_queries_against_a_layer_of_a_cache(exact, num_queries, window, settings):
    query, key, value, dout = inputs(3, num_queries, 333, 6, 2)
    stack = [np.stack([np.full_like(x, np.nan), x]) for x in (key, value)]
    positions = np.array([[0], [200], [332 - num_queries]]) + np.arange(num_queries)
    allowed = causal(positions, 333)
    if window is not None:
        allowed &= np.arange(333) > positions[..., None] - window
    call = jax.jit(
        lambda q, k, v, layer: attention(
            q, k, v, positions=jnp.asarray(positions), window=window, layer=layer, return_lse=True, **settings
        )
    )
    out, lse = call(query, *stack, jnp.int32(1))
    expected = exact(query, key, value, dout, allowed, 40**-0.5)
    np.testing.assert_allclose(out, expected.out, atol=2e-6)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-5)

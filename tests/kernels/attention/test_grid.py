"""Values and every gradient of the kernels against float64, over a grid in which all pairs of settings occur."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.attention import attention
from fastjax.kernels.attention.blocks import Tiles
from fastjax.kernels.attention.options import Options
from fastjax.kernels.attention.pallas_triton import plan_for, seen_keys
from fastjax.kernels.attention.pallas_triton_forward import forward_pallas

LENGTHS = (1, 17, 63, 127, 129, 192, 1000)
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 7, 32)
WINDOWS = (None, 1, 3, 4096)
DTYPES = ("float32", "bfloat16", "float16")
MASKS = ("causal", "all", "segments", "more keys")
GRID = (LENGTHS, HEAD_DIMS, GROUPS, WINDOWS, DTYPES, MASKS)
# Every pair of values of two settings stands in one of these at least; many heads and long rows go with few tiles.
COVERING = (
    (1, 64, 1, 3, "float32", "causal"),
    (1, 80, 3, None, "float16", "segments"),
    (1, 96, 4, 3, "float32", "causal"),
    (1, 128, 7, 1, "float32", "more keys"),
    (1, 256, 32, 4096, "bfloat16", "all"),
    (17, 64, 7, 4096, "float16", "segments"),
    (17, 80, 32, 3, "float16", "causal"),
    (17, 96, 3, 1, "float32", "all"),
    (17, 128, 1, None, "bfloat16", "more keys"),
    (17, 256, 4, 1, "float32", "causal"),
    (63, 64, 1, None, "float16", "all"),
    (63, 80, 4, 4096, "float32", "more keys"),
    (63, 96, 3, 4096, "bfloat16", "all"),
    (63, 128, 32, 3, "float32", "segments"),
    (63, 256, 7, 1, "bfloat16", "causal"),
    (127, 64, 1, None, "float32", "segments"),
    (127, 80, 7, 3, "float32", "causal"),
    (127, 96, 1, 1, "float16", "more keys"),
    (127, 96, 32, None, "bfloat16", "causal"),
    (127, 128, 4, 3, "float16", "all"),
    (127, 256, 3, 4096, "float32", "more keys"),
    (129, 64, 32, 1, "float16", "more keys"),
    (129, 80, 7, None, "float16", "all"),
    (129, 96, 4, 3, "bfloat16", "segments"),
    (129, 128, 3, 4096, "float16", "causal"),
    (129, 256, 1, None, "float32", "all"),
    (192, 64, 3, 3, "bfloat16", "more keys"),
    (192, 64, 32, 4096, "float32", "segments"),
    (192, 80, 1, 1, "bfloat16", "segments"),
    (192, 96, 1, 4096, "float16", "all"),
    (192, 128, 7, 3, "float32", "segments"),
    (192, 256, 4, None, "float32", "causal"),
    (1000, 64, 4, 1, "float32", "more keys"),
    (1000, 64, 32, 1, "float32", "segments"),
    (1000, 80, 1, None, "float32", "causal"),
    (1000, 96, 7, 3, "float32", "causal"),
    (1000, 128, 3, 4096, "bfloat16", "all"),
    (1000, 256, 1, 3, "float16", "segments"),
)
# Relative error of a whole array: rounded weights, outputs and gradients.
TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-3, "float16": 7e-4}


def pairs(case):
    return set(itertools.combinations(enumerate(case), 2))


def test_every_pair_is_covered():
    assert set().union(*map(pairs, COVERING)) == set().union(*map(pairs, itertools.product(*GRID)))


def close(found, expected, dtype):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    # A single key's weight is 1, whatever its score: its exact gradient is 0, and what is found is rounding.
    scale = max(np.linalg.norm(expected), 0.1 * np.sqrt(expected.size))
    error = np.linalg.norm(found - expected) / scale
    assert np.isfinite(error) and error < TOLERANCE[dtype], error


def segments_of(length):
    """[1, length]: documents of several lengths, the last part padding."""
    ends = sorted({1, length // 3, length // 3 + 1, length - length // 5})
    ids = np.searchsorted(ends, np.arange(length), side="right") + 1
    ids[length - length // 5 :] = 0
    return ids[None].astype(np.int32)


def check(exact, length, head_dim, group, window, dtype, masks, interpret):
    num_keys = length + 65 if masks == "more keys" else length
    keys = jax.random.split(jax.random.key(length), 4)
    shapes = [(1, length, group, head_dim), *[(1, num_keys, 1, head_dim)] * 2, (1, length, group, head_dim)]
    query, key, value, dout = (jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True))
    causal, segment_ids = masks != "all", segments_of(length) if masks == "segments" else None
    t, s = np.arange(length)[:, None] + num_keys - length, np.arange(num_keys)[None, :]
    allowed = (s <= t) if causal else np.ones((length, num_keys), bool)
    if window is not None:
        allowed &= np.abs(t - s) < window
    if segment_ids is not None:
        allowed = allowed & (segment_ids[0][:, None] == segment_ids[0][None, :]) & (segment_ids[0][:, None] != 0)

    @jax.jit
    def run(query, key, value, dout):
        out, vjp = jax.vjp(
            lambda *x: attention(
                *x,
                segment_ids=None if segment_ids is None else jnp.asarray(segment_ids),
                causal=causal,
                window=window,
                implementation="pallas_triton",
                interpret=interpret,
            ),
            query,
            key,
            value,
        )
        return out, *vjp(dout)

    found = run(query, key, value, dout)
    expected = exact(query, key, value, dout, allowed[None], head_dim**-0.5)
    for one, two in zip(found, (expected.out, *expected.gradients), strict=True):
        assert one.dtype == dtype
        close(one, two, dtype)
    if interpret and length == 1000:
        # Long in the interpreter, which adds in one order anyway.
        return
    again = run(query, key, value, dout)
    for one, two in zip(found, again, strict=True):
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize(("length", "head_dim", "group", "window", "dtype", "masks"), COVERING)
def test_covering_cases(exact, length, head_dim, group, window, dtype, masks, interpret):
    check(exact, length, head_dim, group, window, dtype, masks, interpret)


def test_queries_by_way_of_registers_are_the_same_queries(interpret):
    length, head_dim, tiles = (20, 24, Tiles(16, 16, 4, 2)) if interpret else (1000, 128, Tiles(64, 64, 4, 3))
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (
        jax.random.normal(k, (1, length, n, head_dim)).astype("bfloat16") for k, n in zip(keys, (2, 1, 1), strict=True)
    )
    found = [
        forward_pallas(query, key[None], value[None], {}, Options(scale=0.2), each, interpret=interpret)
        for each in (tiles, replace(tiles, query_in_registers=True))
    ]
    for one, two in zip(*found, strict=True):
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize(
    ("settings", "is_packed", "count"),
    [({}, False, 4096), ({"causal": False}, False, 8192), ({"window": 5000}, False, 0), ({}, True, 0)],
)
def test_long_rows_alone_bring_queries_into_registers(settings, is_packed, count):
    assert seen_keys(Options(scale=1.0, **settings), 8192, is_packed=is_packed) == count
    query = jax.ShapeDtypeStruct((1, 8192, 4, 128), "bfloat16")
    plan = plan_for(query, query, splits_keys=False, num_seen=count, interpret=False)
    assert plan.forward.query_in_registers == (count >= 4096)


@pytest.mark.slow
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("group", (1, 3, 7))
@pytest.mark.parametrize("head_dim", (64, 96))
@pytest.mark.parametrize("length", (17, 129, 192))
def test_wide_grid(exact, length, head_dim, group, window, masks, interpret):
    check(exact, length, head_dim, group, window, "float32", masks, interpret)

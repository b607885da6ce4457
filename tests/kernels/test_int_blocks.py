"""Blocks of integers: the reference against float64, the kernels against the reference, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.int_blocks import quantize_int_blocks, sum_int_blocks

LARGEST = {8: 127, 4: 7}


def values(size, seed=0):
    """Magnitudes over six decades, a block of zeros among them."""
    draw = np.random.default_rng(seed)
    out = np.exp(draw.normal(-6, 3, size)) * draw.choice([-1, 1], size)
    out[256:512] = 0
    return out.astype(np.float32)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_reference_is_the_nearest_code_of_a_grid_in_float64(bits):
    x = values(2048)
    codes, scales, error = map(np.asarray, quantize_int_blocks(jnp.asarray(x), bits, implementation="reference"))
    assert (codes.shape, codes.dtype) == ((2048 * bits // 8,), np.int8)
    blocks = x.reshape(-1, 256).astype(np.float64)
    step = np.abs(blocks).max(-1) / LARGEST[bits]
    np.testing.assert_allclose(scales, step, rtol=1e-6)
    grid = np.arange(-LARGEST[bits], LARGEST[bits] + 1) * step[:, None, None]
    nearest = np.abs(blocks[..., None] - grid).min(-1)
    tolerance = 1e-6 * np.abs(blocks).max()
    np.testing.assert_allclose(np.abs(error.reshape(blocks.shape)), nearest, atol=tolerance, rtol=1e-4)
    packed = codes.reshape(-1, 256 * bits // 8).view(np.uint8).astype(int)
    if bits == 4:
        packed = np.concatenate([packed & 15, packed >> 4], axis=1)
    signed = np.where(packed >= 2 ** (bits - 1), packed - 2**bits, packed)
    assert np.abs(signed).max() == LARGEST[bits]
    np.testing.assert_allclose(signed * scales[:, None] + error.reshape(blocks.shape), blocks, rtol=1e-5, atol=1e-7)
    total = sum_int_blocks(jnp.stack([codes] * 3), jnp.stack([scales] * 3), bits, implementation="reference")
    np.testing.assert_allclose(np.asarray(total).reshape(blocks.shape), 3 * signed * scales[:, None], rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_blocks", [1, 3, 19])
def test_the_kernels_equal_the_reference(bits, num_blocks, interpret):
    # The reference compiled too: a multiplication and an addition may become one instruction.
    run = {
        name: jax.jit(
            lambda x, name=name: quantize_int_blocks(
                x, bits, implementation=name, interpret=interpret and name == "pallas_triton"
            )
        )
        for name in ("reference", "pallas_triton")
    }
    parts = [values(num_blocks * 256 + 512, seed)[-num_blocks * 256 :] for seed in range(3)]
    found = [run["pallas_triton"](part) for part in parts]
    for part, ours in zip(parts, found, strict=True):
        theirs = run["reference"](part)
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)
        np.testing.assert_allclose(ours[2], theirs[2], atol=1e-5 * float(np.abs(part).max()))
    codes, scales = jnp.stack([one[0] for one in found]), jnp.stack([one[1] for one in found])
    total = sum_int_blocks(codes, scales, bits, implementation="pallas_triton", interpret=interpret)
    expected = sum_int_blocks(codes, scales, bits, implementation="reference")
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "pallas_triton"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_in_its_block_alone(bad, implementation, interpret):
    x = values(768)
    x[300] = bad
    how = {"implementation": implementation, "interpret": interpret and implementation == "pallas_triton"}
    codes, scales, _ = quantize_int_blocks(jnp.asarray(x), 8, **how)
    total = np.asarray(sum_int_blocks(codes[None], scales[None], 8, **how)).reshape(3, 256)
    assert np.isnan(total[1]).all() and np.isfinite(total[[0, 2]]).all()


def test_refusals():
    x = jnp.zeros(512)
    codes, scales, _ = quantize_int_blocks(x, 8)
    with pytest.raises(ValueError, match=r"\(100,\) make no whole blocks"):
        quantize_int_blocks(x[:100], 8)
    with pytest.raises(ValueError, match="bits=5"):
        quantize_int_blocks(x, 5)
    with pytest.raises(ValueError, match="do not fit scales"):
        sum_int_blocks(codes[None], scales[None], 4)
    with pytest.raises(ValueError, match="expected int8"):
        sum_int_blocks(codes, scales, 8)
    with pytest.raises(NotImplementedError, match="pallas_triton"):
        quantize_int_blocks(x, 8, implementation="pallas_triton")

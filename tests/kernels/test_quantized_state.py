"""8-bit moments against bitsandbytes' maps and CPU library, and against a nearest-entry search in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.nf4.tables import dynamic_map
from fastjax.kernels.quantized_state import dequantize_state as dequantize_eagerly
from fastjax.kernels.quantized_state import quantize_state as quantize_eagerly
from fastjax.kernels.quantized_state.reference import absmax_shape, zero_code

# As the optimiser runs them; operation by operation each would be compiled alone.
quantize_state = jax.jit(quantize_eagerly, static_argnames=("signed", "num_stacked"))
dequantize_state = jax.jit(dequantize_eagerly, static_argnames=("signed", "num_stacked"))


def _values(shape, signed, seed=0):
    """Magnitudes over eight decades, as second moments have."""
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(-8, 4, shape)) * (rng.choice([-1, 1], shape) if signed else 1)
    return values.astype(np.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(signed):
    from bitsandbytes.functional import create_dynamic_map

    np.testing.assert_array_equal(dynamic_map(signed), create_dynamic_map(signed))
    assert dynamic_map(signed)[zero_code(signed)] == 0


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(512,), (33, 80), (1, 1), (2, 128, 16)])
def test_codes_are_the_nearest_entries(shape, signed):
    values = _values(shape, signed)
    codes, absmax = quantize_state(values, signed=signed)
    flat = values.reshape(-1).astype(np.float64)
    blocks = np.pad(flat, (0, -flat.size % 256)).reshape(-1, 256)
    np.testing.assert_array_equal(absmax.reshape(-1), np.abs(blocks).max(-1).astype(np.float32))
    scaled = (blocks / np.abs(blocks).max(-1, keepdims=True)).reshape(-1)[: flat.size]
    table = dynamic_map(signed).astype(np.float64)
    distance = np.abs(scaled - table[np.asarray(codes).reshape(-1)])
    nearest = np.abs(scaled[:, None] - table).min(-1)
    np.testing.assert_allclose(distance, nearest, rtol=1e-5, atol=1e-9)
    decoded = dequantize_state(codes, absmax, signed=signed)
    scale = np.repeat(np.asarray(absmax).reshape(-1), 256)[: flat.size]
    np.testing.assert_array_equal(
        decoded.reshape(-1), dynamic_map(signed)[np.asarray(codes).reshape(-1)] * scale.astype(np.float32)
    )


@pytest.mark.parametrize("signed", [True, False])
def test_bitsandbytes_reads_what_we_wrote(signed):
    import torch
    from bitsandbytes.functional import create_dynamic_map

    codes, absmax = quantize_state(_values((33, 80), signed), signed=signed)
    theirs = torch.ops.bitsandbytes.dequantize_blockwise(
        torch.tensor(np.asarray(codes)),
        torch.tensor(np.asarray(absmax)),
        create_dynamic_map(signed),
        256,
        torch.float32,
    )
    np.testing.assert_array_equal(dequantize_state(codes, absmax, signed=signed), theirs.numpy())


def test_an_all_zero_block_stays_zero():
    values = jnp.zeros((2, 256)).at[1, 3].set(2.0)
    for signed in (True, False):
        codes, absmax = quantize_state(values, signed=signed)
        np.testing.assert_array_equal(absmax.reshape(-1), [0, 2])
        np.testing.assert_array_equal(dequantize_state(codes, absmax, signed=signed), values)


@pytest.mark.parametrize("shape", [(3, 10, 70), (3, 4, 128), (3, 5)])
def test_no_block_spans_two_stacked_tensors(shape):
    values = _values(shape, True)
    codes, absmax = quantize_state(values, signed=True, num_stacked=1)
    for i in range(len(values)):
        one, scales = quantize_state(values[i], signed=True)
        np.testing.assert_array_equal(codes[i], one)
        np.testing.assert_array_equal(absmax[i], scales)
    np.testing.assert_array_equal(
        dequantize_state(codes, absmax, signed=True, num_stacked=1)[1],
        dequantize_state(codes[1], absmax[1], signed=True),
    )


def test_dimensions_before_whole_blocks_stay():
    assert absmax_shape((32, 4096, 14336), 1) == (32, 4096, 56)
    assert absmax_shape((32, 4096, 16), 1) == (32, 256)
    assert absmax_shape((32, 10, 70), 1) == (32, 3)
    assert jax.eval_shape(lambda x: quantize_state(x, signed=True), jnp.zeros((6, 512)))[1].shape == (6, 2)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="num_stacked=1: expected at least one dimension behind"):
        quantize_state(jnp.zeros(4), signed=True, num_stacked=1)
    codes, absmax = quantize_state(jnp.ones(300), signed=True)
    with pytest.raises(ValueError, match="codes are int8; they must be uint8"):
        dequantize_state(codes.astype(jnp.int8), absmax, signed=True)
    with pytest.raises(ValueError, match=r"absmax \(1,\) does not fit codes \(300,\): expected \(2,\)"):
        dequantize_state(codes, absmax[:1], signed=True)

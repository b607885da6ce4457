"""The reference quantiser and dequantiser against bitsandbytes' CPU library, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.nf4 import dequantize, quantize
from fastjax.kernels.nf4.reference import torch_mean
from fastjax.kernels.nf4.tables import CODES, dynamic_map

bnb = pytest.importorskip("bitsandbytes.functional")
torch = pytest.importorskip("torch")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def one_thread():
    """torch's mean depends on its number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_weight(shape, dtype: str, seed: int = 0):
    """A torch weight with a zero row, and the same one in jax."""
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.05)
    if shape[0] > 2:
        values[1] = 0
    weight = values.to(DTYPES[dtype])
    return weight, jnp.asarray(weight.float().numpy()).astype(dtype)


def same_bits(ours, theirs) -> None:
    theirs = theirs.float() if theirs.dtype == torch.bfloat16 else theirs
    np.testing.assert_array_equal(np.asarray(ours.astype(np.asarray(theirs).dtype)).reshape(-1), theirs.reshape(-1))


def dequantized_by_formula(packed, state, shape, quant_type):
    """table[code] * absmax in torch: bitsandbytes' own library reads wrong scales at some widths, see below."""
    size = shape[0] * shape[1]
    packed = packed.reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[:size].long()
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    values = bnb.get_4bit_type(quant_type, device="cpu")[codes] * absmax.repeat_interleave(64)[:size]
    return values.to(state.dtype).reshape(shape)


def test_tables_are_those_of_bitsandbytes():
    for quant_type, codes in CODES.items():
        np.testing.assert_array_equal(codes, bnb.get_4bit_type(quant_type, device="cpu"))
    np.testing.assert_array_equal(dynamic_map(), bnb.create_dynamic_map())


# Whole blocks, a partial last block, blocks across rows, an odd number of elements, one block, one element.
@pytest.mark.parametrize("shape", [(192, 576), (300, 65), (33, 80), (5, 13), (1, 64), (1, 1)])
@pytest.mark.parametrize(
    ("dtype", "quant_type", "nested"),
    [("float32", "nf4", True), ("bfloat16", "nf4", True), ("float16", "nf4", False), ("bfloat16", "fp4", True)],
)
def test_bytes_and_values_are_those_of_bitsandbytes(shape, dtype, quant_type, nested):
    theirs, ours = random_weight(shape, dtype)
    packed, state = bnb.quantize_4bit(theirs, quant_type=quant_type, compress_statistics=nested)
    weight = quantize(ours, quant_type=quant_type, nested=nested, implementation="reference").check()
    same_bits(weight.codes, packed)
    same_bits(weight.absmax, state.absmax)
    if nested:
        same_bits(weight.nested_scale, state.state2.absmax)
        same_bits(weight.nested_table, state.state2.code)
        same_bits(weight.nested_offset, state.offset)
    values = dequantize(weight, implementation="reference")
    assert values.dtype == dtype and values.shape == shape
    same_bits(values, dequantized_by_formula(packed, state, shape, quant_type))
    if not (shape[1] % 16 == 0 and shape[1] % 64 != 0):
        # At the widths left out, its AVX-512 code takes in // 64 scales a row instead of running through.
        same_bits(values, bnb.dequantize_4bit(packed, state))


@pytest.mark.parametrize("num_blocks", [1, 7, 36, 257, 1000, 9216, 32767, 229376])
def test_offset_is_torchs_mean_on_one_thread(num_blocks):
    absmax = torch.rand(num_blocks, generator=torch.Generator().manual_seed(num_blocks)) * 0.05 + 0.02
    assert float(jax.jit(torch_mean)(jnp.asarray(absmax.numpy()))) == absmax.mean().item()


def test_documented_bytes_and_ties():
    row = jnp.asarray([1, -1, 0.5, -0.5, 0.25, 0, 0.08, -0.3])
    weight = quantize(jnp.tile(row, (8, 1)), nested=False, implementation="reference")
    assert bytes(np.asarray(weight.codes[:4])).hex() == "f0c2a784" and weight.absmax.tolist() == [1.0]
    table = CODES["nf4"]
    half_way = (table[:-1] + table[1:]) / 2
    tie = quantize(
        jnp.asarray(np.r_[1.0, half_way, np.zeros(48)].reshape(1, 64), jnp.float32), implementation="reference"
    )
    codes = np.stack([tie.codes[0] >> 4, tie.codes[0] & 15], 1).reshape(-1)
    np.testing.assert_array_equal(codes[1:16], np.arange(15))
    odd = quantize(jnp.ones((1, 65)), implementation="reference")
    assert odd.codes.shape == (33,) and int(odd.codes[-1]) == 0xF7


def test_zero_blocks_stay_zero_and_five_blocks_nest():
    weight = jnp.zeros((2, 64)).at[1, 3].set(2.0)
    plain = quantize(weight, nested=False, implementation="reference")
    assert plain.absmax.reshape(-1).tolist() == [0.0, 2.0] and set(np.asarray(plain.codes[0]).tolist()) == {0x77}
    for nested in (True, False):
        values = dequantize(quantize(weight, nested=nested, implementation="reference"), implementation="reference")
        assert np.isfinite(values).all() and not np.asarray(values[0]).any()
    five = quantize(jnp.ones((5, 64)), implementation="reference")
    assert five.nested_scale.shape == (1,)
    np.testing.assert_array_equal(dequantize(five, implementation="reference"), 1.0)

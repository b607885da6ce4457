"""quant_matmul against a float64 product with bitsandbytes' values, and every kernel's value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.nf4 import dequantize, quantize
from fastjax.kernels.quant_matmul import quant_matmul
from fastjax.kernels.quant_matmul.blocks import FewRowsTiles
from fastjax.kernels.quant_matmul.pallas_triton import quant_matmul_pallas

# Relative error of the whole result: float32 sums, and bfloat16 codes, weights and outputs.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 4e-3}


def inputs(num_rows, num_out, num_in, dtype, quant_type="nf4", nested=True):
    keys = jax.random.split(jax.random.key(num_rows), 3)
    values = jax.random.normal(keys[0], (num_out, num_in), dtype) * 0.05
    weight = quantize(values, quant_type=quant_type, nested=nested)
    x = jax.random.normal(keys[1], (num_rows, num_in)).astype(dtype)
    return x, weight, jax.random.normal(keys[2], (num_rows, num_out)).astype(dtype)


def close(found, expected, dtype):
    expected = np.asarray(expected, np.float64)
    error = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    assert np.isfinite(error) and error < TOLERANCE[dtype], error


@pytest.mark.parametrize(
    ("implementation", "num_rows", "shape", "dtype", "quant_type"),
    [
        # Up to 16 rows of bfloat16 the kernel for few rows. 576 and 192 are odd block counts.
        ("pallas_triton", 1, (33, 576), "bfloat16", "nf4"),
        ("pallas_triton", 2, (70, 192), "float32", "fp4"),
        ("pallas_triton", 9, (48, 256), "bfloat16", "fp4"),
        ("pallas_triton", 3, (33, 64), "float16", "nf4"),
        ("pallas_triton", 17, (33, 192), "float32", "nf4"),
        ("pallas_triton", 65, (65, 64), "bfloat16", "nf4"),
        ("dequantize", 5, (70, 192), "bfloat16", "nf4"),
        ("dequantize", 3, (33, 80), "float32", "nf4"),
        ("reference", 3, (33, 80), "float32", "nf4"),
    ],
)
def test_values_and_input_gradient(implementation, num_rows, shape, dtype, quant_type, interpret):
    x, weight, dout = inputs(num_rows, *shape, dtype, quant_type, nested=implementation != "reference")

    @jax.jit
    def run(x):
        y, vjp = jax.vjp(lambda x: quant_matmul(x, weight, implementation=implementation, interpret=interpret), x)
        return y, vjp(dout)[0]

    y, dx = run(x)
    assert y.dtype == dx.dtype == dtype
    exact = np.asarray(dequantize(weight, jnp.float32), np.float64)
    close(y, np.asarray(x, np.float64) @ exact.T, dtype)
    close(dx, np.asarray(dout, np.float64) @ exact, dtype)


@pytest.mark.parametrize(
    ("num_rows", "shape", "tiles", "quant_type", "rank"),
    [
        # Several steps a warp and a rest; scales' codes four at a time; rows of W and of x past the end; an adapter.
        (5, (40, 896), FewRowsTiles(in_warps=2, row_warps=2, row_tiles=1, columns=4), "nf4", 3),
        (17, (33, 1280), FewRowsTiles(in_warps=1, row_warps=2, row_tiles=2, columns=16), "fp4", 19),
    ],
)
def test_tiles_of_the_kernel_for_few_rows(num_rows, shape, tiles, quant_type, rank, interpret):
    x, weight, _ = inputs(num_rows, *shape, "bfloat16", quant_type)
    expected = np.asarray(x, np.float64) @ np.asarray(dequantize(weight, jnp.float32), np.float64).T
    adapter = None
    if rank:
        keys = jax.random.split(jax.random.key(9), 2)
        adapter = tuple(
            jax.random.normal(keys[i], (size, rank), jnp.bfloat16) for i, size in ((0, num_rows), (1, shape[0]))
        )
        expected += np.asarray(adapter[0], np.float64) @ np.asarray(adapter[1], np.float64).T
    y = jax.jit(lambda x: quant_matmul_pallas(x, weight, adapter, tiles=tiles, interpret=interpret))(x)
    close(y, expected, "bfloat16")


@pytest.mark.parametrize(
    ("implementation", "num_rows", "num_in"), [("pallas_triton", 2, 64), ("dequantize", 5, 64), ("dequantize", 5, 80)]
)
def test_several_weights_of_one_x(implementation, num_rows, num_in, interpret):
    outs = (33, 16)
    x = inputs(num_rows, 1, num_in, "bfloat16")[0]
    weights = [inputs(num_rows + i, out, num_in, "bfloat16")[1] for i, out in enumerate(outs)]
    douts = tuple(inputs(num_rows, out, num_in, "bfloat16")[2] for out in outs)
    options = {"implementation": implementation, "interpret": interpret}
    ys, vjp = jax.vjp(jax.jit(lambda x: quant_matmul(x.reshape(num_rows, 1, num_in), weights, **options)), x)
    assert [y.shape for y in ys] == [(num_rows, 1, out) for out in outs]
    (dx,) = vjp(tuple(dout[:, None] for dout in douts))
    exact = [np.asarray(dequantize(weight, jnp.float32), np.float64) for weight in weights]
    for y, matrix in zip(ys, exact, strict=True):
        close(y[:, 0], np.asarray(x, np.float64) @ matrix.T, "bfloat16")
    close(dx, sum(np.asarray(dout, np.float64) @ matrix for dout, matrix in zip(douts, exact, strict=True)), "bfloat16")


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("nested", [True, False])
def test_a_layer_is_read_where_it_lies_in_the_stack(num_rows, nested, interpret):
    x, first, dout = inputs(num_rows, 33, 192, "bfloat16", nested=nested)
    second = inputs(num_rows + 1, 33, 192, "bfloat16", nested=nested)[1]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, second)
    options = {"implementation": "pallas_triton", "interpret": interpret}

    @jax.jit
    def both(weight):
        y, vjp = jax.vjp(lambda x: quant_matmul(x, weight, **options), x)
        return y, vjp(dout)[0]

    for i, layer in enumerate((first, second)):
        jax.tree.map(np.testing.assert_array_equal, both(stack.at(i)), both(layer))


def test_float32_over_a_narrower_weight_sees_its_rounded_values():
    x, weight, _ = inputs(2, 33, 128, "float32")
    narrow = quantize(dequantize(weight).astype(jnp.bfloat16))
    y = quant_matmul(x, narrow, interpret=True)
    close(y, np.asarray(x, np.float64) @ np.asarray(dequantize(narrow), np.float64).T, "float32")
    with pytest.raises(NotImplementedError, match="does not round what it decodes to bfloat16"):
        quant_matmul(x, narrow, implementation="pallas_triton", interpret=True)


def test_leading_dims_stay_and_the_weight_gets_no_gradient():
    x, weight, _ = inputs(6, 33, 64, "float32")
    y = quant_matmul(x.reshape(2, 3, 64), weight)
    np.testing.assert_array_equal(y.reshape(6, 33), quant_matmul(x, weight))
    gradient = jax.grad(lambda w: quant_matmul(x, w).sum(), allow_int=True)(weight)
    for leaf in (gradient.nested_scale, gradient.nested_offset, gradient.nested_table):
        np.testing.assert_array_equal(leaf, 0)


def test_a_zero_block_gives_no_nan():
    weight = quantize(jnp.zeros((16, 128)).at[3, 64:].set(0.5))
    x = jnp.ones((1, 128))
    y, vjp = jax.vjp(lambda x: quant_matmul(x, weight, implementation="pallas_triton", interpret=True), x)
    np.testing.assert_allclose(y[0], np.r_[np.zeros(3), 32.0, np.zeros(12)], atol=1e-6)
    assert np.isfinite(vjp(y)[0]).all()


def test_refusals():
    x, weight, _ = inputs(2, 33, 80, "float32")
    with pytest.raises(ValueError, match=r"x \(2, 79\) and weight \(33, 80\)"):
        quant_matmul(x[:, 1:], weight)
    with pytest.raises(ValueError, match="an empty sequence of weights"):
        quant_matmul(x, [])
    with pytest.raises(ValueError, match="known: pallas_triton, dequantize, reference"):
        quant_matmul(x, weight, implementation="fused")
    with pytest.raises(NotImplementedError, match="multiples of 64; this weight has in=80"):
        quant_matmul(x, weight, implementation="pallas_triton", interpret=True)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        quant_matmul(x, weight, implementation="dequantize")

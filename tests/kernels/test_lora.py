"""lora_matmul against torch's autograd over the dequantised weight, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.lora import lora_matmul
from fastjax.kernels.lora.blocks import GradientTiles, columns_are_cheaper
from fastjax.kernels.lora.pallas_triton_backward import gradient_products
from fastjax.kernels.nf4 import QuantizedWeight, dequantize, quantize

torch = pytest.importorskip("torch")

TOLERANCE = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}


def inputs(num_rows, num_in, outs, ranks, dtype, weight_dtype="bfloat16", quantized=True):
    rng = np.random.default_rng(num_rows)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    weights = [normal(out, num_in) * 0.05 for out in outs]
    weights = [quantize(w.astype(weight_dtype)) if quantized else w.astype(dtype) for w in weights]
    lora_a = [normal(rank, num_in) * 0.1 for rank in ranks]
    lora_b = [normal(out, rank) * 0.1 for out, rank in zip(outs, ranks, strict=True)]
    scales = [0.5 + i for i in range(len(outs))]
    douts = tuple(normal(num_rows, out).astype(dtype) for out in outs)
    return normal(num_rows, num_in).astype(dtype), weights, lora_a, lora_b, scales, douts


def torch_results(x, weights, lora_a, lora_b, scales, douts):
    """y_i, dx, dA_i, dB_i by autograd in float64."""
    leaf = lambda v: torch.from_numpy(np.array(v, np.float64)).requires_grad_()  # noqa: E731
    x, lora_a, lora_b = leaf(x), [leaf(a) for a in lora_a], [leaf(b) for b in lora_b]
    matrices = [dequantize(w, jnp.float32) if isinstance(w, QuantizedWeight) else w for w in weights]
    outputs = [
        x @ torch.from_numpy(np.array(matrix, np.float64)).T + scale * (x @ a.T) @ b.T
        for matrix, a, b, scale in zip(matrices, lora_a, lora_b, scales, strict=True)
    ]
    torch.autograd.backward(outputs, [torch.from_numpy(np.array(d, np.float64)) for d in douts])
    return [y.detach() for y in outputs], x.grad, [a.grad for a in lora_a], [b.grad for b in lora_b]


@pytest.mark.parametrize(
    ("implementation", "num_rows", "num_in", "outs", "ranks", "dtype"),
    [
        ("pallas_triton", 1, 192, (33,), (4,), "bfloat16"),
        ("pallas_triton", 5, 192, (33, 70), (8, 17), "float32"),
        ("joined", 5, 128, (33, 70, 8), (8, 17, 8), "float32"),
        ("joined", 17, 128, (64, 33), (8, 8), "bfloat16"),
        ("joined", 5, 320, (16,), (16,), "float32"),
        ("joined", 66, 320, (16,), (4,), "float16"),
        ("joined", 5, 64, (33, 70, 8), (40, 8, 8), "bfloat16"),
        ("separate", 5, 80, (33, 70), (8, 17), "float32"),
        ("separate", 5, 128, (33,), (8,), "bfloat16"),
    ],
)
def test_values_and_gradients_are_those_of_torch(implementation, num_rows, num_in, outs, ranks, dtype, interpret):
    # The values of a bfloat16 weight stay rounded to it where x is float32; the fused kernel refuses that pair.
    weight_dtype = dtype if implementation == "pallas_triton" else "bfloat16"
    x, weights, lora_a, lora_b, scales, douts = inputs(num_rows, num_in, outs, ranks, dtype, weight_dtype)

    joined = len(outs) == 2 and implementation != "pallas_triton"

    @jax.jit
    def run(x, a, b):
        options = {"implementation": implementation, "interpret": interpret, "joined": joined}
        results, vjp = jax.vjp(lambda *v: lora_matmul(v[0], weights, v[1], v[2], scales, **options), x, a, b)
        gradients = vjp(jnp.concatenate(douts, axis=1) if joined else douts)
        return jnp.split(results, [outs[0]], axis=1) if joined else results, *gradients

    found = run(x, lora_a, lora_b)
    assert found[1].dtype == dtype and found[2][0].dtype == jnp.float32
    expected = torch_results(x, weights, lora_a, lora_b, scales, douts)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.asarray(ours, np.float64) - theirs.numpy()) / np.linalg.norm(theirs.numpy())
        assert error < TOLERANCE[dtype], error


def test_a_layer_of_a_stack_is_that_layer(interpret):
    x, first, (a,), (b,), (scale,), (dout,) = inputs(3, 64, (32,), (8,), "bfloat16")
    second = inputs(4, 64, (32,), (8,), "bfloat16")[1]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), first[0], second[0])

    def run(weight):
        options = {"implementation": "joined", "interpret": interpret}
        y, vjp = jax.vjp(lambda x: lora_matmul(x, weight, a, b, scale, **options), x)
        return y, vjp(dout)[0]

    found = jax.jit(lambda layer: run(stack.at(layer)))(1)
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(run)(second[0]))


@pytest.mark.parametrize(("num_rows", "outs"), [(64, (32, 32)), (50, (33, 70, 8))])
def test_products_of_the_gradient_over_several_tiles(num_rows, outs, interpret):
    normal = np.random.default_rng(0).standard_normal
    dout, xa, b = normal((num_rows, sum(outs))), normal((num_rows, 16 * len(outs))), normal((sum(outs), 16))
    dout, xa, b = (jnp.asarray(v, jnp.bfloat16) for v in (dout, xa, b))
    tiles = GradientTiles(columns=32, rows=16, steps=2, num_warps=4, num_stages=2)
    t, db = gradient_products(dout, xa, b, outs, tiles=tiles, interpret=interpret)
    dout, xa, b, t, db = (np.asarray(v, np.float64) for v in (dout, xa, b, t, db))
    for i, (end, num_out) in enumerate(zip(np.cumsum(outs), outs, strict=True)):
        rows, columns = slice(end - num_out, end), slice(16 * i, 16 * i + 16)
        np.testing.assert_allclose(t[:, columns], dout[:, rows] @ b[rows], rtol=5e-3, atol=1e-3)
        np.testing.assert_allclose(db[rows], dout[:, rows].T @ xa[:, columns], rtol=1e-4, atol=1e-4)


def test_both_ways_of_adding_the_product_are_tested_above():
    assert columns_are_cheaper(128, 111) and not columns_are_cheaper(320, 16)


def test_a_16_bit_weight_and_one_projection():
    x, (weight,), (a,), (b,), (scale,), (dout,) = inputs(5, 96, (33,), (8,), "float32", quantized=False)
    y, vjp = jax.vjp(lambda x, a, b: lora_matmul(x.reshape(5, 1, 96), weight, a, b, scale), x, a, b)
    assert y.shape == (5, 1, 33)
    expected = torch_results(x, [weight], [a], [b], [scale], [dout])
    np.testing.assert_allclose(y[:, 0], expected[0][0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(vjp(dout[:, None]), (expected[1], expected[2][0], expected[3][0]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["joined", "separate"])
def test_only_x_and_its_low_rank_product_are_kept_for_the_backward(implementation):
    x, weights, lora_a, lora_b, scales, _ = inputs(4096, 64, (64,), (8,), "float32")
    residuals = jax.eval_shape(
        lambda x: jax.vjp(
            lambda x, a: lora_matmul(x, weights, a, lora_b, scales, implementation=implementation, interpret=True),
            x, lora_a,
        )[1],
        x,
    )  # fmt: skip
    kept = [leaf.shape for leaf in jax.tree.leaves(residuals) if 4096 in leaf.shape]
    assert sorted(kept) == [(4096, 16), (4096, 64)]


def test_refusals():
    x, weights, lora_a, lora_b, scales, _ = inputs(2, 64, (33, 70), (8, 8), "float32")
    with pytest.raises(ValueError, match="1 lora_a"):
        lora_matmul(x, weights, lora_a[:1], lora_b, scales)
    with pytest.raises(ValueError, match=r"x \(2, 63\) and weight"):
        lora_matmul(x[:, 1:], weights, lora_a, lora_b, scales)
    with pytest.raises(ValueError, match=r"expected \[R, in\] and \[out, R\]"):
        lora_matmul(x, weights, lora_a, lora_b[::-1], scales)
    with pytest.raises(NotImplementedError, match="4-bit weights only"):
        lora_matmul(x, jnp.zeros((3, 64)), lora_a[0], jnp.zeros((3, 8)), 1.0, implementation="joined", interpret=True)
    with pytest.raises(NotImplementedError, match="does not round what it decodes to bfloat16"):
        lora_matmul(x, weights, lora_a, lora_b, scales, implementation="pallas_triton", interpret=True)
    with pytest.raises(ValueError, match="known: pallas_triton, joined, separate"):
        lora_matmul(x, weights, lora_a, lora_b, scales, implementation="reference")

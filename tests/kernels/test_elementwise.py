"""RMSNorm, SwiGLU and RoPE: references against torch's modules, kernels against references, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.rms_norm import rms_norm
from fastjax.kernels.rope import rope, rope_joined
from fastjax.kernels.swiglu import swiglu, swiglu_joined

TOLERANCE = {"float32": {"rtol": 2e-5, "atol": 2e-5}, "bfloat16": {"rtol": 2e-2, "atol": 2e-2}}


def normal(seed, shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def assert_close(found, expected, dtype):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), **TOLERANCE[dtype])


def value_and_gradients(function, arguments, cotangents):
    value, vjp = jax.vjp(function, *arguments)
    return value, vjp(cotangents)


def to_torch(x):
    import torch

    return torch.tensor(np.asarray(x, np.float32), dtype=getattr(torch, str(x.dtype)), requires_grad=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_references_equal_transformers(dtype):
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    x, weight, dy = normal(0, (2, 5, 48), dtype), normal(1, (48,), dtype), normal(2, (2, 5, 48), dtype)
    module = LlamaRMSNorm(48, eps=1e-5)
    module.weight = torch.nn.Parameter(to_torch(weight).detach())
    theirs = to_torch(x)
    y = module(theirs)
    y.backward(to_torch(dy).detach())
    expected = [jnp.asarray(t.detach().float().numpy(), dtype) for t in (y, theirs.grad, module.weight.grad)]
    value, gradients = value_and_gradients(lambda x, w: rms_norm(x, w, eps=1e-5), (x, weight), dy)
    assert_close([value, *gradients], expected, dtype)
    if dtype == "float32":
        gate, up = to_torch(x), to_torch(dy)
        y = torch.nn.functional.silu(gate) * up
        y.backward(torch.ones_like(y))
        expected = [jnp.asarray(t.detach().numpy()) for t in (y, gate.grad, up.grad)]
        value, gradients = value_and_gradients(swiglu, (x, dy), jnp.ones_like(x))
        assert_close([value, *gradients], expected, dtype)
    query, key = normal(3, (2, 5, 3, 8), dtype), normal(4, (2, 5, 1, 8), dtype)
    angles = normal(5, (2, 5, 4)) * 3
    doubled = [to_torch(jnp.tile(table(angles), (1, 1, 2))).detach() for table in (jnp.cos, jnp.sin)]
    heads_first = [to_torch(jnp.swapaxes(x, 1, 2)).detach().float() for x in (query, key)]
    turned = apply_rotary_pos_emb(*heads_first, *doubled)
    expected = tuple(jnp.asarray(t.transpose(1, 2).numpy(), dtype) for t in turned)
    assert_close(rope(query, key, jnp.cos(angles), jnp.sin(angles)), expected, dtype)


@pytest.mark.parametrize("kind", ["alone", "with its sum", "of a sum"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 17, 48), "float32"), ((5, 576), "bfloat16"), ((1, 4096), "bfloat16"), ((2, 4864), "float32")],
)
def test_rms_norm_kernels_equal_the_reference(shape, dtype, kind, interpret):
    arguments = [normal(0, shape, dtype), normal(1, shape[-1:], dtype), normal(2, shape, dtype)]
    cotangents = normal(3, shape, dtype)
    if kind != "alone":
        cotangents = (normal(4, shape, dtype), cotangents)
    if kind != "of a sum":
        arguments.pop()
    how = {"eps": 1e-5, "with_sum": kind != "alone", "interpret": interpret}

    def run(implementation, x, weight, residual=None):
        return rms_norm(x, weight, residual=residual, implementation=implementation, **how)

    found = value_and_gradients(lambda *args: run("pallas_triton", *args), arguments, cotangents)
    expected = value_and_gradients(lambda *args: run("reference", *args), arguments, cotangents)
    assert_close(found[0], expected[0], dtype)
    (dx, dweight, *dresidual), (expected_dx, _, *expected_dresidual) = found[1], expected[1]
    assert_close([dx, *dresidual], [expected_dx, *expected_dresidual], dtype)
    # A sum over rows, which the reference takes in the weight's dtype.
    total = sum(np.asarray(part, np.float64) for part in (arguments[0], *arguments[2:]))
    normalised = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + 1e-5)
    dy = np.asarray(cotangents if kind == "alone" else cotangents[1], np.float64)
    exact = (dy * normalised).reshape(-1, shape[-1]).sum(0)
    assert dweight.dtype == arguments[1].dtype
    np.testing.assert_allclose(np.asarray(dweight, np.float64), exact, **TOLERANCE[dtype])


def test_statistics_do_not_overflow_and_rows_of_zeros_stay_zero(interpret):
    x = jnp.zeros((2, 48), jnp.float16).at[0].set(300.0)
    y = rms_norm(x, jnp.ones(48, jnp.float16), eps=1e-5, implementation="pallas_triton", interpret=interpret)
    np.testing.assert_array_equal(y, jnp.zeros((2, 48)).at[0].set(1.0))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5, 48), "float32"), ((2, 1536), "bfloat16"), ((3, 4864), "bfloat16"), ((7, 1), "float32")]
)
def test_swiglu_kernels_equal_the_reference(shape, dtype, interpret):
    arguments, dy = [3 * normal(i, shape, dtype) for i in range(2)], normal(2, shape, dtype)

    def run(implementation):
        return value_and_gradients(
            lambda gate, up: swiglu(gate, up, implementation=implementation, interpret=interpret), arguments, dy
        )

    expected = run("reference")
    assert_close(run("pallas_triton"), expected, dtype)
    joined = jnp.concatenate(arguments, axis=-1)
    how = {"implementation": "pallas_triton", "interpret": interpret}
    y, (gradient,) = value_and_gradients(lambda joined: swiglu_joined(joined, **how), [joined], dy)
    assert_close((y, tuple(jnp.split(gradient, 2, axis=-1))), (expected[0], tuple(expected[1])), dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 17, 4, 2, 64), "bfloat16"), ((1, 3, 9, 3, 80), "float32"), ((1, 2, 3, 1, 12), "float32")],
)
def test_rope_kernel_equals_the_reference(shape, dtype, interpret):
    batch, length, num_heads, num_kv_heads, size = shape
    query, key = (normal(i, (batch, length, n, size), dtype) for i, n in enumerate((num_heads, num_kv_heads)))
    angles = 5 * normal(2, (batch, length, size // 2))
    cotangents = normal(3, query.shape, dtype), normal(4, key.shape, dtype)

    def run(implementation):
        return value_and_gradients(
            lambda q, k: rope(
                q, k, jnp.cos(angles), jnp.sin(angles), implementation=implementation, interpret=interpret
            ),
            (query, key),
            cotangents,
        )

    expected = run("reference")
    assert_close(run("pallas_triton"), expected, dtype)
    # The same of one array that holds both and the values, which only move.
    flat = lambda x: x.reshape(batch, length, -1)  # noqa: E731
    value, dvalue = normal(5, key.shape, dtype), normal(6, key.shape, dtype)
    how = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "interpret": interpret}
    outputs = (*expected[0], value)
    gradient = jnp.concatenate([flat(x) for x in (*expected[1], dvalue)], axis=-1)
    for implementation in ("pallas_triton", "reference"):
        found, found_gradient = value_and_gradients(
            partial(rope_joined, cos=jnp.cos(angles), sin=jnp.sin(angles), implementation=implementation, **how),
            [jnp.concatenate([flat(x) for x in (query, key, value)], axis=-1)],
            (*cotangents, dvalue),
        )
        assert_close(found, outputs, dtype)
        assert_close(found_gradient[0], gradient, dtype)


def test_bad_input_is_named():
    x = jnp.zeros((4, 8))
    with pytest.raises(ValueError, match=r"x \(4, 8\) and weight \(7,\)"):
        rms_norm(x, jnp.zeros(7), eps=1e-5)
    with pytest.raises(ValueError, match="residual bfloat16"):
        rms_norm(x, jnp.zeros(8), eps=1e-5, residual=x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="must be of one shape and dtype"):
        swiglu(x, x[:2])
    with pytest.raises(ValueError, match="an even number of columns"):
        swiglu_joined(x[:, :7])
    with pytest.raises(ValueError, match=r"expected \[B, T, N, H\]"):
        rope(jnp.zeros((1, 2, 3, 8)), jnp.zeros((1, 2, 3, 6)), jnp.zeros((1, 2, 4)), jnp.zeros((1, 2, 4)))
    with pytest.raises(ValueError, match=r"expected \[B, T, 30\]"):
        rope_joined(jnp.zeros((1, 2, 31)), *[jnp.zeros((1, 2, 3))] * 2, num_heads=3, num_kv_heads=1)
    for op in (
        lambda **how: rms_norm(x, jnp.zeros(8), eps=1e-5, **how),
        lambda **how: swiglu(x, x, **how),
        lambda **how: rope(x.reshape(1, 2, 2, 8), x.reshape(1, 2, 2, 8), *[jnp.zeros((1, 2, 4))] * 2, **how),
    ):
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
            op(implementation="pallas_triton")
        with pytest.raises(ValueError, match="known: .*reference"):
            op(implementation="cuda")

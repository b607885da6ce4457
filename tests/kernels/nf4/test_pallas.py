"""The Pallas kernels, interpreted, against the reference; the weight's invariants; refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.nf4 import abstract_weight, dequantize, quantize
from fastjax.kernels.nf4.pallas_triton import dequantize_joined, indexable


def random_weight(shape, dtype="float32"):
    return (jax.random.normal(jax.random.key(0), shape) * 0.05).at[0].set(0).astype(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "quant_type", "nested"),
    [
        ((70, 128), "bfloat16", "nf4", True),
        ((33, 80), "float32", "nf4", True),
        ((5, 13), "float16", "fp4", True),
        ((2, 64), "float32", "nf4", False),
    ],
)
def test_kernels_equal_the_reference_bit_for_bit(shape, dtype, quant_type, nested, interpret):
    options = {"quant_type": quant_type, "nested": nested}
    weight = random_weight(shape, dtype)
    expected = quantize(weight, **options, implementation="reference")
    found = quantize(weight, **options, implementation="pallas_triton", interpret=interpret)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for out in (dtype, "bfloat16", "float32"):
        np.testing.assert_array_equal(
            dequantize(expected, out, implementation="pallas_triton", interpret=interpret),
            dequantize(expected, out, implementation="reference"),
        )


def test_joined_weights_lie_below_one_another(interpret):
    weights = [quantize(random_weight(shape), implementation="reference") for shape in ((33, 128), (70, 128), (1, 128))]
    joined = dequantize_joined(weights, jnp.dtype(jnp.float32), extra_columns=64, interpret=interpret)
    assert joined.shape == (104, 192)
    expected = np.concatenate([dequantize(weight, implementation="reference") for weight in weights])
    np.testing.assert_array_equal(joined[:, :128], expected)


def test_a_stack_of_weights_scans_layer_by_layer():
    layers = [quantize(random_weight((4, 128)) * (i + 1), implementation="reference") for i in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers).check()
    assert stack.shape == (4, 128) and stack.nbytes == 3 * layers[0].nbytes
    abstract = abstract_weight((4, 128), num_layers=3, dtype=jnp.float32)
    assert jax.tree.map(lambda x: (x.shape, str(x.dtype)), stack) == jax.tree.map(
        lambda x: (x.shape, str(x.dtype)), abstract
    )
    values = jax.lax.scan(lambda carry, weight: (carry, dequantize(weight)), None, stack)[1]
    for layer, value in zip(layers, values, strict=True):
        np.testing.assert_array_equal(value, dequantize(layer))
    with pytest.raises(ValueError, match="hold 3 layers"):
        dequantize(stack)


@pytest.mark.parametrize("shape", [(9, 128), (33, 80)])
@pytest.mark.parametrize("nested", [True, False])
def test_a_layer_is_read_where_it_lies_in_the_stack(shape, nested, interpret):
    options = {"nested": nested, "implementation": "reference"}
    layers = [quantize(random_weight(shape) * (i + 1), **options) for i in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    options = {"implementation": "pallas_triton", "interpret": interpret}
    values = jax.jit(
        lambda stack: jax.lax.scan(lambda carry, i: (carry, dequantize(stack.at(i), **options)), None, jnp.arange(3))[1]
    )(stack)
    for layer, value in zip(layers, values, strict=True):
        np.testing.assert_array_equal(value, dequantize(layer, implementation="reference"))
    if shape[1] % 64 == 0:
        joined = dequantize_joined([stack.at(2), layers[0]], jnp.dtype(jnp.float32), interpret=interpret)
        np.testing.assert_array_equal(joined, np.concatenate([values[2], values[0]]))


def test_stacks_that_32_bits_cannot_index_are_copied_out():
    """Pallas takes 64 bits for arrays of more than 2^32 bytes only."""

    def copied(num_layers: int) -> bool:
        stack = abstract_weight((8192, 8192), num_layers=num_layers)
        return jax.eval_shape(lambda stack, i: indexable(stack.at(i)), stack, jnp.int32(0)).layer is None

    assert not copied(63) and copied(64) and copied(80) and copied(128) and not copied(129)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_type": "nf3"}, "quant_type='nf3' is unknown; known: nf4, fp4"),
        ({"absmax": None}, "absmax is missing"),
        ({"codes": jnp.zeros((4, 63), jnp.uint8)}, r"codes is uint8 \(4, 63\).*needs uint8 \(4, 64\)"),
        ({"absmax": jnp.zeros((4, 2), jnp.float32)}, r"absmax is float32.*needs uint8 \(4, 2\)"),
        ({"nested_scale": None}, "go together"),
    ],
)
def test_a_broken_weight_names_the_field(change, words):
    weight = quantize(random_weight((4, 128)), implementation="reference")
    with pytest.raises(ValueError, match=words):
        dequantize(dataclasses.replace(weight, **change))


def test_bad_arguments_are_named():
    weight = random_weight((4, 128))
    with pytest.raises(ValueError, match=r"expected \[out, in\]"):
        quantize(weight[0])
    with pytest.raises(ValueError, match="weight is int32"):
        quantize(weight.astype(jnp.int32))
    with pytest.raises(ValueError, match="known: nf4, fp4"):
        quantize(weight, quant_type="int4")
    with pytest.raises(ValueError, match="dtype=int8 must be"):
        dequantize(quantize(weight), jnp.int8)
    with pytest.raises(ValueError, match="known: pallas_triton, reference"):
        quantize(weight, implementation="triton")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        dequantize(quantize(weight), implementation="pallas_triton")

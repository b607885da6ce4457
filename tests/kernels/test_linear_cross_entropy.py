"""The chunked loss and its gradients against a float64 formula, and against the plain reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.kernels.linear_cross_entropy import linear_cross_entropy
from fastjax.kernels.linear_cross_entropy.chunked import Options, losses_and_gradient
from fastjax.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference


def _inputs(num_tokens=37, width=24, vocab=101, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((num_tokens, width)).astype(np.float32)
    weight = rng.standard_normal((vocab, width)).astype(np.float32)
    targets = rng.integers(0, vocab, num_tokens).astype(np.int32)
    loss_weights = (rng.random(num_tokens) < 0.6) * rng.choice([1.0, 0.5, 2.0], num_tokens)
    return hidden, weight, targets, loss_weights.astype(np.float32)


def _float64(hidden, weight, targets, loss_weights):
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    rows = np.arange(len(targets))
    loss = -(log_probabilities[rows, targets] * loss_weights).sum()
    dlogits = np.exp(log_probabilities)
    dlogits[rows, targets] -= 1
    dlogits *= loss_weights[:, None]
    return loss, dlogits @ weight.astype(np.float64), dlogits.T @ hidden.astype(np.float64)


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 37, 64])
def test_loss_and_gradients_equal_float64(chunk_size):
    hidden, weight, targets, loss_weights = _inputs()
    loss, dhidden, dweight = _float64(hidden, weight, targets, loss_weights)

    def ours(hidden, weight):
        return 3.0 * linear_cross_entropy(
            hidden, weight, targets, loss_weights, train_weight=True, chunk_size=chunk_size
        )

    value, gradients = jax.value_and_grad(ours, (0, 1))(hidden, weight)
    np.testing.assert_allclose(value, 3 * loss, rtol=1e-6)
    np.testing.assert_allclose(gradients[0], 3 * dhidden, atol=2e-5)
    np.testing.assert_allclose(gradients[1], 3 * dweight, atol=2e-5)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"z_loss": 0.01}, {"softcap": 5.0, "z_loss": 0.1}])
def test_softcap_and_z_loss_equal_the_reference(options):
    hidden, weight, targets, loss_weights = _inputs()
    ours = jax.value_and_grad(
        lambda h, w: linear_cross_entropy(h, w, targets, loss_weights, train_weight=True, chunk_size=8, **options),
        (0, 1),
    )(hidden, weight)
    reference = jax.value_and_grad(
        lambda h, w: linear_cross_entropy_reference(h, w, targets, loss_weights, **options), (0, 1)
    )(hidden, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), ours, reference)


@pytest.mark.parametrize("vocab", [64, 101, 5003])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 0.01}])
def test_the_kernel_equals_plain_jnp(vocab, options, interpret):
    hidden, weight, targets, loss_weights = _inputs(num_tokens=9, vocab=vocab)

    def run(implementation):
        return jax.value_and_grad(
            lambda h, w: linear_cross_entropy(
                h, w, targets, loss_weights, train_weight=True, chunk_size=4, implementation=implementation,
                interpret=interpret, **options,
            ),
            (0, 1),
        )(hidden, weight)  # fmt: skip

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), run("pallas_triton"), run("xla"))


def test_the_kernel_survives_logits_of_minus_infinity_and_large_ones(interpret):
    logits = jnp.full((2, 300), -jnp.inf).at[:, 7].set(1e4).at[1, 299].set(1e4)
    options = Options(False, None, 0.0, 2, None, "pallas_triton", interpret)
    losses, dlogits = losses_and_gradient(logits, jnp.asarray([7, 299]), jnp.ones(2), jnp.dtype(jnp.float32), options)
    np.testing.assert_allclose(losses, [0, np.log(2)], atol=1e-3)
    expected = np.zeros((2, 300))
    expected[1, 7], expected[1, 299] = 0.5, -0.5
    np.testing.assert_allclose(dlogits, expected, atol=1e-3)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets, loss_weights = _inputs()
    gradient = jax.grad(lambda w: linear_cross_entropy(hidden, w, targets, loss_weights))(weight)
    np.testing.assert_array_equal(gradient, 0)


def test_tokens_without_weight_may_hold_nan_and_any_target():
    hidden, weight, targets, loss_weights = _inputs()
    expected = linear_cross_entropy(hidden, weight, targets, loss_weights)
    hidden = np.where(loss_weights[:, None] > 0, hidden, np.nan)
    targets = np.where(loss_weights > 0, targets, -100)
    loss, gradient = jax.value_and_grad(lambda h: linear_cross_entropy(h, weight, targets, loss_weights))(hidden)
    assert loss == expected
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[loss_weights == 0], 0)


def test_no_target_at_all_is_zero():
    hidden, weight, targets, _ = _inputs()
    none = jnp.zeros(len(targets))
    loss, gradient = jax.value_and_grad(lambda h: linear_cross_entropy(h, weight, targets, none))(hidden)
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)


def test_bfloat16_logits_are_reduced_in_float32():
    # 8 x 100 bfloat16 logits, key 42: taken through an identity head they must give float32's loss of the same logits.
    logits = jax.random.uniform(jax.random.key(42), (8, 100), jnp.bfloat16)
    targets = jnp.arange(8)
    loss = linear_cross_entropy(logits, jnp.eye(100, dtype=jnp.bfloat16), targets, jnp.ones(8))
    exact = -jax.nn.log_softmax(logits.astype(jnp.float32))[jnp.arange(8), targets].sum()
    np.testing.assert_allclose(loss, exact, atol=1e-5)


def test_all_float32_logits_never_exist():
    num_tokens, width, vocab = 512, 16, 5003

    def step(hidden, weight, targets, loss_weights):
        return jax.value_and_grad(lambda h: linear_cross_entropy(h, weight, targets, loss_weights))(hidden)

    f32, i32 = jnp.float32, jnp.int32
    shapes = [((num_tokens, width), f32), ((vocab, width), f32), ((num_tokens,), i32), ((num_tokens,), f32)]
    text = jax.jit(step).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile().as_text()
    assert f"f32[128,{vocab}]" in text
    assert f"[{num_tokens},{vocab}]" not in text


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (((4, 8), (10, 7), (4,), (4,)), {}, r"\[N, D\] and \[V, D\]"),
        (((4, 8), (10, 8), (5,), (4,)), {}, r"\[N\] = \(4,\)"),
        (((4, 8), (10, 8), (4,), (4,)), {"chunk_size": 0}, "chunk_size=0"),
    ],
)
def test_bad_input_is_named(shapes, options, words):
    hidden, weight, targets, loss_weights = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(hidden, weight, targets.astype(int), loss_weights, **options)


def test_an_implementation_that_cannot_run_here_says_why():
    hidden, weight, targets, loss_weights = _inputs()
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        linear_cross_entropy(hidden, weight, targets, loss_weights, implementation="pallas_triton")
    with pytest.raises(ValueError, match="known: pallas_triton, xla"):
        linear_cross_entropy(hidden, weight, targets, loss_weights, implementation="reference")

"""Heads of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.linear_cross_entropy.api import linear_cross_entropy
from fastjax.kernels.linear_cross_entropy.pallas_triton import losses_and_gradient_pallas

# (tokens, hidden size, vocabulary)
SHAPES: dict[str, tuple[int, int, int]] = {
    "Llama-3-8B": (8192, 4096, 128256),
    "SmolLM2-135M": (512, 576, 49152),
    "vocabulary 32003": (256, 48, 32003),
}


def loss_and_gradient(implementation: str, **options: Any) -> Callable:
    """(hidden, weight, targets, loss_weights) -> (loss, dhidden)."""

    def run(hidden, weight, targets, loss_weights):
        return jax.value_and_grad(
            lambda hidden: linear_cross_entropy(
                hidden, weight, targets, loss_weights, implementation=implementation, **options
            )
        )(hidden)

    return run


def abstract_arguments(shape: tuple[int, int, int], dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of `loss_and_gradient`'s function."""
    num_tokens, width, vocab = shape
    return (
        jax.ShapeDtypeStruct((num_tokens, width), dtype),
        jax.ShapeDtypeStruct((vocab, width), dtype),
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
    )


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of the kernel alone, at shapes that stand for its kinds."""
    for name, options in (("Llama-3-8B", (None, 0.0)), ("vocabulary 32003", (30.0, 1e-4))):
        softcap, z_loss = options
        run = partial(losses_and_gradient_pallas, dtype=jnp.dtype(jnp.bfloat16), softcap=softcap, z_loss=z_loss)
        rows = jax.ShapeDtypeStruct((2048,), jnp.int32), jax.ShapeDtypeStruct((2048,), jnp.float32)
        yield f"{name}, softcap {softcap}", run, (jax.ShapeDtypeStruct((2048, SHAPES[name][2]), jnp.float32), *rows)

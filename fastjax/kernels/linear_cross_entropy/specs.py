"""Heads of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.linear_cross_entropy.api import linear_cross_entropy

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
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    yield "Llama-3-8B", loss_and_gradient("pallas_triton"), abstract_arguments(SHAPES["Llama-3-8B"])
    odd = abstract_arguments(SHAPES["vocabulary 32003"], jnp.float32)
    yield "vocabulary 32003, softcap, z-loss", loss_and_gradient("pallas_triton", softcap=30.0, z_loss=1e-4), odd

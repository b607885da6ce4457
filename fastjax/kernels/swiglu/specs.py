"""MLPs of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.swiglu.api import swiglu, swiglu_joined

# (tokens, feed-forward width)
SHAPES: dict[str, tuple[int, int]] = {
    "Llama-3-8B": (8192, 14336),
    "SmolLM2-135M": (2048, 1536),
    "Qwen2-0.5B": (129, 4864),
    "width 100": (17, 100),
}


def forward_and_gradients(implementation: str) -> Callable:
    """(gate, up, dy) -> (y, (dgate, dup))."""

    def run(gate, up, dy):
        y, vjp = jax.vjp(lambda gate, up: swiglu(gate, up, implementation=implementation), gate, up)
        return y, vjp(dy)

    return run


def joined_forward_and_gradient(implementation: str) -> Callable:
    """([gate | up], dy) -> (y, its gradient)."""

    def run(joined, dy):
        y, vjp = jax.vjp(lambda joined: swiglu_joined(joined, implementation=implementation), joined)
        return y, vjp(dy)[0]

    return run


def abstract_arguments(shape: tuple[int, int], dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of `forward_and_gradients`' function."""
    return (jax.ShapeDtypeStruct(shape, dtype),) * 3


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    for name in ("Llama-3-8B", "Qwen2-0.5B"):
        yield name, forward_and_gradients("pallas_triton"), abstract_arguments(SHAPES[name])
    yield "width 100, float32", forward_and_gradients("pallas_triton"), abstract_arguments((17, 100), jnp.float32)
    rows, width = SHAPES["Llama-3-8B"]
    joined, dy = (jax.ShapeDtypeStruct((rows, n * width), jnp.bfloat16) for n in (2, 1))
    yield "Llama-3-8B, joined", joined_forward_and_gradient("pallas_triton"), (joined, dy)

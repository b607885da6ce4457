"""Rows of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.rms_norm.api import rms_norm

# (tokens, hidden size)
SHAPES: dict[str, tuple[int, int]] = {
    "Llama-3-8B": (8192, 4096),
    "Llama-3-70B": (2048, 8192),
    "SmolLM2-135M": (2048, 576),
    "Qwen2-0.5B": (129, 896),
    "width 48": (17, 48),
}


def forward_and_gradients(implementation: str) -> Callable:
    """(x, residual, weight, dsum, dy) -> ((sum, y), (dx, dresidual))."""

    def run(x, residual, weight, dsum, dy):
        outputs, vjp = jax.vjp(
            lambda x, r: rms_norm(x, weight, eps=1e-5, residual=r, implementation=implementation), x, residual
        )
        return outputs, vjp((dsum, dy))

    return run


def abstract_arguments(shape: tuple[int, int], dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of `forward_and_gradients`' function."""
    rows, weight = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], dtype)
    return rows, rows, weight, rows, rows


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    for name in ("Llama-3-8B", "SmolLM2-135M"):
        yield name, forward_and_gradients("pallas_triton"), abstract_arguments(SHAPES[name])
    yield (
        "width 48, float32",
        forward_and_gradients("pallas_triton"),
        abstract_arguments(SHAPES["width 48"], jnp.float32),
    )

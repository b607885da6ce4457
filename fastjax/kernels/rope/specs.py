"""Heads of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.rope.api import rope

# (batch, length, query heads, key heads, head size)
SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "Llama-3-8B": (4, 2048, 32, 8, 128),
    "SmolLM2-135M": (2, 129, 9, 3, 64),
    "head size 80": (1, 17, 3, 1, 80),
}


def forward_and_gradients(implementation: str) -> Callable:
    """(query, key, cos, sin, dquery, dkey) -> ((query, key) turned, (dquery, dkey) turned back)."""

    def run(query, key, cos, sin, dquery, dkey):
        turned, vjp = jax.vjp(lambda q, k: rope(q, k, cos, sin, implementation=implementation), query, key)
        return turned, vjp((dquery, dkey))

    return run


def abstract_arguments(
    shape: tuple[int, int, int, int, int], dtype: Any = jnp.bfloat16
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of `forward_and_gradients`' function."""
    batch, length, num_heads, num_kv_heads, size = shape
    query, key = (jax.ShapeDtypeStruct((batch, length, heads, size), dtype) for heads in (num_heads, num_kv_heads))
    table = jax.ShapeDtypeStruct((batch, length, size // 2), jnp.float32)
    return query, key, table, table, query, key


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    for name, shape in SHAPES.items():
        yield name, forward_and_gradients("pallas_triton"), abstract_arguments(shape)

"""Heads of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.rope.api import rope, rope_joined

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


def joined_forward_and_gradient(implementation: str, num_heads: int, num_kv_heads: int) -> Callable:
    """(joined, cos, sin, dquery, dkey, dvalue) -> ((query, key, value), the gradient of joined)."""
    how: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "implementation": implementation}

    def run(joined, cos, sin, *cotangents):
        outputs, vjp = jax.vjp(lambda joined: rope_joined(joined, cos, sin, **how), joined)
        return outputs, vjp(cotangents)[0]

    return run


def joined_arguments(
    shape: tuple[int, int, int, int, int], dtype: Any = jnp.bfloat16
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of `joined_forward_and_gradient`'s function."""
    query, key, cos, sin, *_ = abstract_arguments(shape, dtype)
    columns = (shape[2] + 2 * shape[3]) * shape[4]
    return jax.ShapeDtypeStruct((*shape[:2], columns), dtype), cos, sin, query, key, key


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
    for name in ("Llama-3-8B", "head size 80"):
        shape = SHAPES[name]
        yield f"{name}, joined", joined_forward_and_gradient("pallas_triton", *shape[2:4]), joined_arguments(shape)

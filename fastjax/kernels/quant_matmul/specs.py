"""Rows and weights of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.nf4.specs import SHAPES
from fastjax.kernels.nf4.weight import QuantizedWeight, abstract_weight
from fastjax.kernels.quant_matmul.api import quant_matmul

NUM_ROWS = (1, 4, 16, 64, 256, 2048, 8192)


def forward(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    return quant_matmul(x, [weight], implementation="pallas_triton")[0]


def joined(x: jax.Array, weights: list[QuantizedWeight]) -> tuple[jax.Array, ...]:
    return tuple(quant_matmul(x, weights, implementation="dequantize"))


def forward_layer(x: jax.Array, stack: QuantizedWeight, layer: jax.Array) -> jax.Array:
    return forward(x, stack.at(layer))


def gradient(x: jax.Array, weight: QuantizedWeight, dout: jax.Array) -> jax.Array:
    return jax.vjp(lambda x: forward(x, weight), x)[1](dout)[0]


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    for name, num_rows in (
        ("Llama-3-8B gate_proj", 1),
        ("Llama-3-8B down_proj", 16),
        ("Llama-3-8B down_proj", 64),
        ("Llama-3-8B k_proj", 8),
        ("SmolLM2-135M k_proj", 3),
        ("Qwen2-0.5B down_proj", 2),
    ):
        x = jax.ShapeDtypeStruct((num_rows, SHAPES[name][1]), jnp.bfloat16)
        yield f"{num_rows} rows, {name}", forward, (x, abstract_weight(SHAPES[name]))
    x, pair = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16), [abstract_weight(SHAPES["Llama-3-8B k_proj"])] * 2
    yield "2048 rows, two weights dequantised into one", joined, (x, pair)
    x = jax.ShapeDtypeStruct((17, 576), jnp.float32)
    yield "17 rows, float32", forward, (x, abstract_weight(SHAPES["SmolLM2-135M k_proj"], dtype=jnp.float32))
    # 9.4e9 bytes of codes: more than 32 bits index.
    stack = abstract_weight((28672, 8192), num_layers=80)
    arguments = (jax.ShapeDtypeStruct((1, 8192), jnp.bfloat16), stack, jax.ShapeDtypeStruct((), jnp.int32))
    yield "1 row, a layer of Llama-3-70B gate_proj", forward_layer, arguments
    for name, num_rows in (("Llama-3-8B gate_proj", 64), ("SmolLM2-135M k_proj", 1)):
        num_out, num_in = SHAPES[name]
        x, dout = (jax.ShapeDtypeStruct((num_rows, size), jnp.bfloat16) for size in (num_in, num_out))
        yield f"gradient, {num_rows} rows, {name}", gradient, (x, abstract_weight(SHAPES[name]), dout)

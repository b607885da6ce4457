"""Projections of one layer of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.lora.api import lora_matmul
from fastjax.kernels.nf4.weight import abstract_weight

# in, and the outs of the projections that share x.
LLAMA_3_8B: dict[str, tuple[int, tuple[int, ...]]] = {
    "q, k, v": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate, up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
SMOLLM2_135M: dict[str, tuple[int, tuple[int, ...]]] = {"q, k, v": (576, (576, 192, 192)), "down": (1536, (576,))}


def forward_and_gradients(implementation: str) -> Callable:
    """(x, weights, lora_a, lora_b, douts) -> (outputs, (dx, dA, dB))."""

    def run(x, weights, lora_a, lora_b, douts):
        scales = (1.0,) * len(weights)
        outputs, gradients = jax.vjp(
            lambda x, a, b: lora_matmul(x, weights, a, b, scales, implementation=implementation), x, lora_a, lora_b
        )
        return outputs, gradients(douts)

    return run


def abstract_arguments(
    group: tuple[int, tuple[int, ...]], num_rows: int, rank: int, *, num_layers: int | None = None
) -> tuple:
    """The arguments of `forward_and_gradients`' function as jax.ShapeDtypeStruct."""
    num_in, outs = group
    dtype = jnp.bfloat16
    x = jax.ShapeDtypeStruct((num_rows, num_in), dtype)
    weights = tuple(abstract_weight((out, num_in), num_layers=num_layers) for out in outs)
    lora_a = tuple(jax.ShapeDtypeStruct((rank, num_in), jnp.float32) for _ in outs)
    lora_b = tuple(jax.ShapeDtypeStruct((out, rank), jnp.float32) for out in outs)
    douts = tuple(jax.ShapeDtypeStruct((num_rows, out), dtype) for out in outs)
    return x, weights, lora_a, lora_b, douts


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    joined, fused = forward_and_gradients("joined"), forward_and_gradients("pallas_triton")
    yield "joined, Llama-3-8B q, k, v, 2048 rows", joined, abstract_arguments(LLAMA_3_8B["q, k, v"], 2048, 16)
    yield "joined, Llama-3-8B down, 2048 rows", joined, abstract_arguments(LLAMA_3_8B["down"], 2048, 64)
    x, weights, *others = abstract_arguments(LLAMA_3_8B["gate, up"], 1000, 32, num_layers=2)
    weights = tuple(replace(weight, layer=jax.ShapeDtypeStruct((), jnp.int32)) for weight in weights)
    yield "joined, a layer of Llama-3-8B gate, up, 1000 rows", joined, (x, weights, *others)
    yield "joined, SmolLM2-135M q, k, v, 129 rows", joined, abstract_arguments(SMOLLM2_135M["q, k, v"], 129, 8)
    yield "fused, Llama-3-8B o, 1 row", fused, abstract_arguments(LLAMA_3_8B["o"], 1, 16)
    yield "fused, SmolLM2-135M down, 17 rows", fused, abstract_arguments(SMOLLM2_135M["down"], 17, 12)

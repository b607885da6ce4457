"""Named weight shapes of real models, and the calls that the compile tests and the benchmarks make of them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.nf4.api import dequantize, quantize
from fastjax.kernels.nf4.weight import QuantizedWeight, abstract_weight

# (out, in)
SHAPES: dict[str, tuple[int, int]] = {
    "Llama-3-8B gate_proj": (14336, 4096),
    "Llama-3-8B down_proj": (4096, 14336),
    "Llama-3-8B q_proj": (4096, 4096),
    "Llama-3-8B k_proj": (1024, 4096),
    "SmolLM2-135M k_proj": (192, 576),
    "Qwen2-0.5B down_proj": (896, 4864),
    "width 80": (33, 80),
}


def dequantize_layer(stack: QuantizedWeight, layer: jax.Array) -> jax.Array:
    return dequantize(stack.at(layer), implementation="pallas_triton")


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    for name in ("Llama-3-8B gate_proj", "SmolLM2-135M k_proj", "width 80"):
        shape = SHAPES[name]
        run = partial(dequantize, implementation="pallas_triton")
        yield f"dequantize {name}", run, (abstract_weight(shape),)
    stack = abstract_weight(SHAPES["Llama-3-8B gate_proj"], num_layers=32)
    yield "dequantize a layer of Llama-3-8B gate_proj", dequantize_layer, (stack, jax.ShapeDtypeStruct((), jnp.int32))
    plain = abstract_weight(SHAPES["Llama-3-8B q_proj"], nested=False, quant_type="fp4", dtype=jnp.float32)
    yield "dequantize fp4, not nested, float32", partial(dequantize, implementation="pallas_triton"), (plain,)
    weight = jax.ShapeDtypeStruct(SHAPES["Llama-3-8B k_proj"], jnp.bfloat16)
    yield "quantize Llama-3-8B k_proj", partial(quantize, implementation="pallas_triton"), (weight,)
    weight = jax.ShapeDtypeStruct(SHAPES["width 80"], jnp.float32)
    yield "quantize width 80", partial(quantize, nested=False, implementation="pallas_triton"), (weight,)

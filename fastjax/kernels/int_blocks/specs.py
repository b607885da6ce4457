"""Gradients of real models, and the calls that the compile tests make of them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.int_blocks.api import packed_width, quantize_int_blocks, sum_int_blocks
from fastjax.kernels.int_blocks.reference import BLOCK_SIZE

# Numbers of one leaf.
SIZES: dict[str, int] = {
    "Llama-3-8B, one down_proj": 4096 * 14336,
    "three blocks": 3 * BLOCK_SIZE,
}


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    for name, size in SIZES.items():
        # A few blocks are a matter of the mask, which does not depend on the bits.
        for bits in (8, 4) if size > 8 * BLOCK_SIZE else (4,):
            quantize = partial(quantize_int_blocks, bits=bits, implementation="pallas_triton")
            yield f"{name}, {bits} bits", quantize, (jax.ShapeDtypeStruct((size,), jnp.float32),)
            add = partial(sum_int_blocks, bits=bits, implementation="pallas_triton")
            codes = jax.ShapeDtypeStruct((8, packed_width(size, bits)), jnp.int8)
            scales = jax.ShapeDtypeStruct((8, size // BLOCK_SIZE), jnp.float32)
            yield f"{name}, {bits} bits, the sum of 8", add, (codes, scales)

"""Named head layouts of real models, and the calls that the compile tests make of them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels.attention.api import attention

# query heads, key/value heads, head size
HEADS: dict[str, tuple[int, int, int]] = {
    "Llama-3-8B": (32, 8, 128),
    "Llama-3.2-1B": (32, 8, 64),
    "Mistral-7B": (32, 8, 128),
    "Qwen2-0.5B": (14, 2, 64),
    "SmolLM2-135M": (9, 3, 64),
    "Phi-2": (32, 32, 80),
    "Phi-3-mini": (32, 32, 96),
    "Gemma-7B": (16, 16, 256),
}


def forward(query, key, value, dout, arrays: dict[str, Any], **settings: Any) -> Any:
    del dout
    return attention(query, key, value, **arrays, implementation="pallas_triton", **settings)


def forward_and_gradients(query, key, value, dout, arrays: dict[str, Any], **settings: Any) -> Any:
    """(out, (dquery, dkey, dvalue))."""
    out, vjp = jax.vjp(lambda q, k, v: forward(q, k, v, dout, arrays, **settings), query, key, value)
    return out, vjp(dout)


def abstract_arguments(
    heads: tuple[int, int, int],
    batch: int,
    num_queries: int,
    num_keys: int | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    num_layers: int | None = None,
    arrays: dict[str, tuple[int, ...]] | None = None,
) -> tuple:
    """Arguments of the functions above as jax.ShapeDtypeStruct; `arrays` are int32 ones by name and shape."""
    num_heads, num_kv_heads, head_dim = heads
    stack = () if num_layers is None else (num_layers,)
    query = jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), dtype)
    key = jax.ShapeDtypeStruct((*stack, batch, num_keys or num_queries, num_kv_heads, head_dim), dtype)
    integers = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in (arrays or {}).items()}
    return query, key, key, query, integers


def compile_cases() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, abstract arguments) of every kernel at shapes that stand for its kinds."""
    llama, phi = HEADS["Llama-3-8B"], HEADS["Phi-2"]
    yield "Llama-3-8B, T 8192", forward_and_gradients, abstract_arguments(llama, 1, 8192)
    packed = {"segment_ids": (2, 1000), "tile_bounds": (2, 4, 1000)}
    yield (
        "Phi-2, float16, packed, window, T 1000",
        partial(forward_and_gradients, window=100),
        abstract_arguments(phi, 2, 1000, dtype=jnp.float16, arrays=packed),
    )
    yield (
        "SmolLM2-135M, float32, T 127, S 192, not causal",
        partial(forward, causal=False),
        abstract_arguments(HEADS["SmolLM2-135M"], 2, 127, 192, dtype=jnp.float32),
    )
    yield "Gemma-7B, T 1000", forward, abstract_arguments(HEADS["Gemma-7B"], 1, 1000)
    cache = {"positions": (16, 1), "layer": ()}
    yield "Llama-3-8B, decoding", forward, abstract_arguments(llama, 16, 1, 4096, num_layers=32, arrays=cache)

"""The preallocated key/value cache of generation."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.kernels._dispatch import target_is_gpu
from fastjax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of every layer.

    A token of position p in its row sits in slot p, so a slot behind a row's newest token is never seen: attention
    masks by position. Prompts are padded on the right; decoding overwrites the padding.

    Attributes:
      key, value: [L, B, S, K, H] in the model's compute dtype; on a CPU bfloat16 as its bits, uint16: XLA has no
        bfloat16 writes there and would turn the whole cache into float32 and back for every token.
      dtype: what `read` returns.
    """

    key: jax.Array
    value: jax.Array
    dtype: Any = field(metadata={"static": True})

    @classmethod
    def create(
        cls, config: ModelConfig, batch: int, length: int, dtype: Any, *, num_heads: int | None = None
    ) -> "KVCache":
        """An empty cache for `batch` rows of at most `length` tokens; `num_heads` key/value heads, None meaning all."""
        heads = config.num_key_value_heads if num_heads is None else num_heads
        shape = (config.num_hidden_layers, batch, length, heads, config.head_dim)
        dtype = jnp.dtype(dtype)
        stored = jnp.uint16 if dtype == jnp.bfloat16 and not target_is_gpu() else dtype
        return cls(jnp.zeros(shape, stored), jnp.zeros(shape, stored), dtype)

    def write(self, layer: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array) -> "KVCache":
        """This cache with [B, T, K, H] keys and values of one layer put at `positions` [B, T].

        A position behind the end is dropped, never clamped onto the last slot; callers size the cache.
        """
        rows = jnp.arange(key.shape[0])[:, None]

        def put(stored: jax.Array, new: jax.Array) -> jax.Array:
            bits = new.astype(self.dtype)
            if stored.dtype != self.dtype:
                bits = jax.lax.bitcast_convert_type(bits, stored.dtype)
            return stored.at[layer, rows, positions].set(bits, mode="drop")

        return KVCache(put(self.key, key), put(self.value, value), self.dtype)

    def read(self, layer: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Keys and values of one layer, [B, S, K, H] each, and None; or those of all layers and which one is meant,
        where attention reads them as they lie."""
        if self.key.dtype == self.dtype:
            return self.key, self.value, layer

        def take(stored: jax.Array) -> jax.Array:
            return jax.lax.bitcast_convert_type(jax.lax.dynamic_index_in_dim(stored, layer, keepdims=False), self.dtype)

        return take(self.key), take(self.value), None

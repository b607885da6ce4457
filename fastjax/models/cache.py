"""The preallocated key/value cache of generation."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of every layer.

    A token of position p in its row sits in slot p, so a slot behind a row's newest token is never seen: attention
    masks by position. Prompts are padded on the right; decoding overwrites the padding.

    Attributes:
      key, value: [L, B, S, K, H] in the model's compute dtype.
    """

    key: jax.Array
    value: jax.Array

    @classmethod
    def create(cls, config: ModelConfig, batch: int, length: int, dtype: Any) -> "KVCache":
        """An empty cache for `batch` rows of at most `length` tokens."""
        shape = (config.num_hidden_layers, batch, length, config.num_key_value_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, layer: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array) -> "KVCache":
        """This cache with [B, T, K, H] keys and values of one layer put at `positions` [B, T].

        A position behind the end is dropped, never clamped onto the last slot; callers size the cache.
        """
        rows = jnp.arange(key.shape[0])[:, None]
        return KVCache(
            self.key.at[layer, rows, positions].set(key.astype(self.key.dtype), mode="drop"),
            self.value.at[layer, rows, positions].set(value.astype(self.value.dtype), mode="drop"),
        )

    def read(self, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer, [B, S, K, H] each."""
        return (
            jax.lax.dynamic_index_in_dim(self.key, layer, keepdims=False),
            jax.lax.dynamic_index_in_dim(self.value, layer, keepdims=False),
        )

"""A model of a known shape with random weights, made on the device: what speed and memory depend on is all there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastjax.kernels.nf4 import QuantizedWeight
from fastjax.kernels.nf4.tables import CODES, dynamic_map
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.presets import preset
from fastjax.models.quant_config import QuantConfig
from fastjax.train.plan.abstract import abstract_model

# The block scales of normal weights of deviation 0.02: their mean, and what the nested codes span around it.
_MEAN_ABSMAX, _ABSMAX_SPAN = 0.047, 0.03


def random_model(name: str, quantization: QuantConfig | None, **changes: Any) -> CausalLM:
    """The preset `name`, with keys of its config.json changed; weights of deviation 0.02, norms of 1."""
    config = ModelConfig.from_hf(preset(name) | changes)
    abstract = abstract_model(config, jnp.bfloat16, quantization)
    graphdef, state = nnx.split(abstract)
    flat = nnx.to_flat_state(state)
    filled = []
    for index, (path, variable) in enumerate(flat):
        key = jax.random.fold_in(jax.random.key(0), index)
        filled.append((path, variable.replace(_random(key, path, variable.get_value()))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _random(key: jax.Array, path: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, QuantizedWeight):
        is_norm = any("norm" in str(part) for part in path)
        return jnp.ones(value.shape, value.dtype) if is_norm else _normal(key, value.shape, value.dtype)
    fills = {
        "codes": lambda leaf: _codes(key, leaf.shape, value.quant_type),
        "absmax": lambda leaf: _bits(jax.random.fold_in(key, 1), leaf.shape),
        "nested_scale": lambda leaf: jnp.full(leaf.shape, _ABSMAX_SPAN, leaf.dtype),
        "nested_offset": lambda leaf: jnp.full(leaf.shape, _MEAN_ABSMAX, leaf.dtype),
        "nested_table": lambda leaf: jnp.broadcast_to(jnp.asarray(dynamic_map()), leaf.shape),
    }
    arrays = {name: fill(getattr(value, name)) for name, fill in fills.items()}
    return QuantizedWeight(**arrays, shape=value.shape, quant_type=value.quant_type, dtype=value.dtype)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Layer by layer, so that no float32 copy of a whole stack is ever there."""
    draw = jax.jit(lambda key: (jax.random.normal(key, shape[-2:], jnp.float32) * 0.02).astype(dtype))
    if len(shape) == 2:
        return draw(key)
    return jnp.stack([draw(jax.random.fold_in(key, layer)) for layer in range(shape[0])])


def _codes(key: jax.Array, shape: tuple[int, ...], quant_type: str) -> jax.Array:
    """Two codes a byte, drawn so that their mean is 0, as that of weights is.

    Codes in equal numbers have the table's mean, in NF4 one in twenty of the deviation: small, but the same in every
    weight, so that a matrix of thousands of columns would mostly add up its inputs.
    """
    table = CODES[quant_type].astype(np.float64)
    positive, negative = table > 0, table < 0
    # As many of either sign as makes their sums equal.
    share = np.ones(16)
    share[positive] = -table[negative].sum() / table[positive].sum()
    chances = jnp.asarray(np.cumsum(share / share.sum()), jnp.float32)
    # 256 even steps of chance, so that each half of a byte is a look-up of 8 random bits.
    codes = jnp.searchsorted(chances, (jnp.arange(256) + 0.5) / 256).astype(jnp.uint8)

    def draw(key: jax.Array) -> jax.Array:
        high, low = (jax.random.bits(one, shape, jnp.uint8) for one in jax.random.split(key))
        return codes[high] << 4 | codes[low]

    return jax.jit(draw)(key)


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.jit(lambda key: jax.random.bits(key, shape, jnp.uint8))(key)

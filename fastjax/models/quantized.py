"""4-bit weights in a model tree.

A Linear's weight is then a QuantizedParam in place of a Param: frozen, and one pytree for a whole stack of layers. The
layer scan does not slice it. It stays outside, and every step of the scan sees one layer of it (`at_layer`), so that
kernels read the bytes where they lie.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastjax.kernels.nf4 import QuantizedWeight, dequantize
from fastjax.kernels.quant_matmul import quant_matmul
from fastjax.models.products import matmul


class QuantizedParam(nnx.Variable):
    """A frozen weight of which all or some layers are 4-bit: a QuantizedWeight or a MixedWeight."""


@partial(jax.tree_util.register_dataclass, data_fields=("quantized", "dense", "layer"), meta_fields=("is_quantized",))
@dataclass(frozen=True)
class MixedWeight:
    """The weights of a stack of layers, some of them 4-bit and the others not (a checkpoint's skip list says which).

    Attributes:
      quantized: a stack of the 4-bit layers, in order.
      dense: [L - n, out, in], the other layers, in order.
      is_quantized: for each of the L layers, whether it is among the n 4-bit ones.
      layer: int32 scalar, the layer that is meant; None means the whole stack.
    """

    quantized: QuantizedWeight
    dense: jax.Array
    is_quantized: tuple[bool, ...]
    layer: jax.Array | None = None

    def at(self, layer: jax.Array | int) -> "MixedWeight":
        """One layer of the stack, without a copy."""
        return replace(self, layer=jnp.asarray(layer, jnp.int32))

    def row(self, layer: int) -> int:
        """Where a layer stands among those of its kind."""
        return sum(kind == self.is_quantized[layer] for kind in self.is_quantized[:layer])

    def traced_row(self) -> jax.Array:
        """`row` of the layer that is meant."""
        rows = [self.row(layer) for layer in range(len(self.is_quantized))]
        return jnp.asarray(rows, jnp.int32)[self.layer]


FrozenWeight = jax.Array | QuantizedWeight | MixedWeight


def full_shape(weight: Any) -> tuple[int, ...]:
    """[*stack, out, in] of a weight of any kind, abstract or not."""
    if isinstance(weight, MixedWeight):
        return (len(weight.is_quantized), *weight.quantized.shape)
    if isinstance(weight, QuantizedWeight):
        return (*weight.stack, *weight.shape)
    return tuple(weight.shape)


def at_layer(state: nnx.State, layer: jax.Array) -> nnx.State:
    """A state of stacked weights, each of them one layer of what it was; 4-bit ones are not copied."""

    def one(value: FrozenWeight) -> FrozenWeight:
        if isinstance(value, QuantizedWeight | MixedWeight):
            return value.at(layer)
        return jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, variable.replace(one(variable.get_value()))) for path, variable in flat])


def frozen_product(x: jax.Array, weight: FrozenWeight) -> jax.Array:
    """x W^T in x's dtype, for one layer's weight of any kind. A 4-bit weight gets no gradient.

    Args:
      x: [..., in].
    Returns: [..., out].
    """
    if isinstance(weight, QuantizedWeight):
        return _one(quant_matmul(x, weight))
    if not isinstance(weight, MixedWeight):
        return matmul(x, weight)
    assert weight.layer is not None
    row = weight.traced_row()
    return jax.lax.cond(
        jnp.asarray(weight.is_quantized)[weight.layer],
        # Where but one layer is at hand, gathered from other devices, it is row 0.
        lambda x: _one(quant_matmul(x, weight.quantized.at(jnp.minimum(row, len(weight.quantized.codes) - 1)))),
        lambda x: matmul(x, jax.lax.dynamic_index_in_dim(weight.dense, row, keepdims=False)),
        x,
    )


def _one(product: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
    assert not isinstance(product, tuple)
    return product


def layer_weight(weight: FrozenWeight, layer: int | None) -> jax.Array | QuantizedWeight:
    """One layer's weight with arrays of its own; `layer` is None for a weight without layers."""
    if layer is None:
        assert not isinstance(weight, MixedWeight)
        return weight
    if isinstance(weight, QuantizedWeight):
        return weight.at(layer).one_layer()
    if not isinstance(weight, MixedWeight):
        return weight[layer]
    row = weight.row(layer)
    return weight.quantized.at(row).one_layer() if weight.is_quantized[layer] else weight.dense[row]


def matrix(weight: jax.Array | QuantizedWeight, dtype: Any = None) -> jax.Array:
    """[out, in] of one layer's weight of either kind, in `dtype` or its own."""
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, dtype)
    return weight if dtype is None else weight.astype(dtype)


def quantized_linears(model: nnx.Module) -> Mapping[tuple[Any, ...], Any]:
    """Path -> Linear of every module whose weight is 4-bit, in some layers at least."""
    return {
        path: module
        for path, module in nnx.iter_modules(model)
        if isinstance(getattr(module, "weight", None), QuantizedParam)
    }


def is_quantized(model: nnx.Module) -> bool:
    """Whether any weight of the model is 4-bit."""
    return bool(quantized_linears(model))


def num_weights(weight: Any) -> int:
    """How many numbers a weight of any kind stands for."""
    return int(np.prod(full_shape(weight)))

"""The building blocks: Linear with a float or 4-bit weight and an optional LoRA adapter, RMSNorm, Embedding.

Weights have HF's layout, [out, in]. `stack` puts a leading layer dimension before every shape: a decoder holds one
module whose leaves are stacked over layers, and scans over it; inside the scan the same module computes one layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastjax.kernels.lora import lora_matmul
from fastjax.kernels.nf4 import QuantizedWeight
from fastjax.kernels.quant_matmul import quant_matmul
from fastjax.kernels.rms_norm import rms_norm
from fastjax.models.products import low_rank, matmul
from fastjax.models.quantized import FrozenWeight, QuantizedParam, frozen_product, full_shape

_INIT_STDDEV = 0.02


class LoraParam(nnx.Param):
    """A low-rank matrix of an adapter: trained, float32."""


class TrainedParam(nnx.Param):
    """A full copy of an embedding or head weight that is trained beside adapters (`modules_to_save`), float32."""


class LoraScale(nnx.Variable):
    """alpha / r (or alpha / sqrt(r)) of each layer; 0 for a layer without adapter. Not trained."""


@dataclass(frozen=True)
class DropoutKey:
    """What decides which elements of an input [rows, ..., features] are dropped, wherever it is computed.

    The bits follow from the key and the indices in the whole input, so that a device with a part of it draws its own.

    Attributes:
      rng: the PRNG key.
      first_row: index of the part's first row.
      part, num_parts: which of so many equal parts of the features this is.
    """

    rng: jax.Array
    first_row: jax.Array | int = 0
    part: jax.Array | int = 0
    num_parts: int = 1

    def kept(self, rate: float, shape: tuple[int, ...]) -> jax.Array:
        """bool of `shape`: which elements stay when `rate` of them are dropped."""
        rows = self.first_row + jnp.arange(shape[0])
        whole = (*shape[1:-1], shape[-1] * self.num_parts)
        rngs = jax.vmap(lambda row: jax.random.fold_in(self.rng, row))(rows)
        bits = jax.vmap(lambda rng: jax.random.bernoulli(rng, 1.0 - rate, whole))(rngs)
        if self.num_parts == 1:
            return bits
        return jax.lax.dynamic_slice_in_dim(bits, self.part * shape[-1], shape[-1], axis=-1)


Rng = jax.Array | DropoutKey | None


class Lora(nnx.Module):
    """The low-rank update of one Linear: scale * dropout(x) A^T B^T.

    Attributes:
      lora_a: [*stack, R, in] float32.  lora_b: [*stack, out, R] float32.  scale: [*stack] float32.
      dropout: probability that an input element is zeroed (the rest is divided by 1 - dropout).

    Layers whose rank is below R are zero in the padding of A and B; both gradients are zero there, so it stays zero.
    """

    def __init__(self, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array, dropout: float = 0.0) -> None:
        self.lora_a = LoraParam(lora_a)
        self.lora_b = LoraParam(lora_b)
        self.scale = LoraScale(scale)
        self.dropout = dropout

    def project(self, x: jax.Array, rng: Rng) -> jax.Array:
        """scale * dropout(x) A^T, [..., R] in x's dtype; without an rng nothing is dropped."""
        return (matmul(self._dropped(x, rng), self.lora_a[...]) * self.scale[...]).astype(x.dtype)

    def __call__(self, x: jax.Array, rng: Rng) -> jax.Array:
        return low_rank(self._dropped(x, rng), self.lora_a[...], self.lora_b[...], self.scale[...])

    def drops(self, rng: Rng) -> bool:
        """Whether dropout changes x under this key."""
        return self.dropout != 0.0 and rng is not None

    def _dropped(self, x: jax.Array, rng: Rng) -> jax.Array:
        if rng is None or not self.drops(rng):
            return x
        key = rng if isinstance(rng, DropoutKey) else DropoutKey(rng)
        return jnp.where(key.kept(self.dropout, x.shape), x / (1.0 - self.dropout), 0).astype(x.dtype)


class Linear(nnx.Module):
    """y = x W^T + b, plus the adapter's update where there is one. Computes and returns in x's dtype.

    Attributes:
      weight: [*stack, out, in] float, or a QuantizedParam, which is never trained.
      bias: [*stack, out] or None.  lora: Lora or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        bias: bool = False,
        stack: tuple[int, ...] = (),
        param_dtype: Any = jnp.float32,
    ) -> None:
        self.weight: nnx.Variable = nnx.Param(normal(rngs, (*stack, out_features, in_features), param_dtype))
        self.bias = nnx.data(nnx.Param(jnp.zeros((*stack, out_features), param_dtype)) if bias else None)
        self.lora: Lora | None = nnx.data(None)

    @property
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""
        return full_shape(self.weight.get_value())

    @property
    def is_quantized(self) -> bool:
        """Whether the weight, or that of some layers, is in 4 bit."""
        return isinstance(self.weight, QuantizedParam)

    def __call__(self, x: jax.Array, rng: Rng = None) -> jax.Array:
        return project((self,), x, (rng,))[0]

    def product(self, x: jax.Array, rng: Rng = None) -> jax.Array:
        """What calling it gives, less the bias."""
        return _products((self,), x, (rng,))[0]


def project(linears: Sequence[Linear], x: jax.Array, rngs: Sequence[Rng] | None = None) -> tuple[jax.Array, ...]:
    """What several Linears make of the same x.

    4-bit weights are decoded into one buffer for one matmul where that is faster, and their adapters join it.

    Args:
      x: [..., in].
      rngs: the key of each adapter's dropout; None drops nothing.
    Returns: [..., out] each, in x's dtype.
    """
    outs = _products(linears, x, [None] * len(linears) if rngs is None else rngs)
    biases = [linear.bias for linear in linears]
    return tuple(y if bias is None else y + bias[...].astype(y.dtype) for y, bias in zip(outs, biases, strict=True))


def _products(linears: Sequence[Linear], x: jax.Array, rngs: Sequence[Rng]) -> Sequence[jax.Array]:
    """`project` without the biases."""
    arguments = _packed_with_adapters(linears, rngs)
    if arguments is not None:
        return lora_matmul(x, *arguments)  # type: ignore[return-value]
    weights: list[FrozenWeight] = [linear.weight.get_value() for linear in linears]
    packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(packed) == len(linears):
        products: Sequence[jax.Array] = quant_matmul(x, packed)  # type: ignore[assignment]
    else:
        products = [frozen_product(x, weight) for weight in weights]
    adapters = [linear.lora for linear in linears]
    return [y if lora is None else y + lora(x, rng) for y, lora, rng in zip(products, adapters, rngs, strict=True)]


def project_joined(linears: Sequence[Linear], x: jax.Array, rngs: Sequence[Rng]) -> jax.Array | None:
    """What `project` returns, side by side, where one matmul makes it so; None elsewhere."""
    arguments = _packed_with_adapters(linears, rngs)
    if arguments is None or any(linear.bias is not None for linear in linears):
        return None
    return lora_matmul(x, *arguments, joined=True)  # type: ignore[return-value]


def _packed_with_adapters(linears: Sequence[Linear], rngs: Sequence[Rng]) -> tuple[list[Any], ...] | None:
    """`lora_matmul`'s arguments after x if all weights are 4-bit and have adapters without dropout."""
    weights = [linear.weight.get_value() for linear in linears]
    adapters = [linear.lora for linear in linears]
    whole = [lora for lora, rng in zip(adapters, rngs, strict=True) if lora is not None and not lora.drops(rng)]
    if len(whole) < len(linears) or not all(isinstance(weight, QuantizedWeight) for weight in weights):
        return None
    values = [[getattr(lora, name)[...] for lora in whole] for name in ("lora_a", "lora_b", "scale")]
    return weights, *values


class Embedding(nnx.Module):
    """Rows of a table. Ids must lie in [0, V): an index behind the end is clamped by XLA, so callers check.

    Attributes:
      weight: [V, D].
      padding_idx: the row that training leaves as it is where it is looked up, as torch's Embedding of that name does
        and transformers sets it to pad_token_id; None means every row is trained.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        padding_idx: int | None = None,
        param_dtype: Any = jnp.float32,
    ) -> None:
        self.weight = nnx.Param(normal(rngs, (num_embeddings, features), param_dtype))
        self.padding_idx = padding_idx

    def __call__(self, ids: jax.Array, dtype: Any, look_up: Callable[..., jax.Array] | None = None) -> jax.Array:
        """[..., D] of ids [...], in `dtype`; `look_up(weight, ids, dtype)` finds the rows of a weight in parts."""
        weight = self.weight[...]
        rows = weight[ids].astype(dtype) if look_up is None else look_up(weight, ids, dtype)
        if self.padding_idx is None:
            return rows
        return jnp.where((ids == self.padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


class RMSNorm(nnx.Module):
    """y = weight * x / sqrt(mean(x^2) + eps).

    Statistics in float32; the normalised x is rounded to x's dtype before it meets the weight, as Llama does.

    Attributes:
      weight: [*stack, D].  eps: added to the mean square.
    """

    def __init__(
        self, features: int, *, eps: float, stack: tuple[int, ...] = (), param_dtype: Any = jnp.float32
    ) -> None:
        self.weight = nnx.Param(jnp.ones((*stack, features), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps)  # type: ignore[return-value]

    def with_sum(self, x: jax.Array, residual: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(s, norm of s) with s = x, or x + residual, which is named "mid"; further uses of x should take s."""
        return rms_norm(x, self.weight[...], eps=self.eps, residual=residual, with_sum=True)  # type: ignore[return-value]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random initial weights, standard deviation 0.02."""
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * _INIT_STDDEV).astype(dtype)

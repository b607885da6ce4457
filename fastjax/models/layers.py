"""The building blocks: Linear with an optional LoRA adapter, RMSNorm, Embedding.

Weights have HF's layout, [out, in]. `stack` puts a leading layer dimension before every shape: a decoder holds one
module whose leaves are stacked over layers, and scans over it; inside the scan the same module computes one layer.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

_INIT_STDDEV = 0.02


class LoraParam(nnx.Param):
    """A low-rank matrix of an adapter: trained, float32."""


class TrainedParam(nnx.Param):
    """A full copy of an embedding or head weight that is trained beside adapters (`modules_to_save`), float32."""


class LoraScale(nnx.Variable):
    """alpha / r (or alpha / sqrt(r)) of each layer; 0 for a layer without adapter. Not trained."""


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

    def project(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        """scale * dropout(x) A^T, [..., R] in x's dtype; without an rng nothing is dropped."""
        return (matmul(self._dropped(x, rng), self.lora_a[...]) * self.scale[...]).astype(x.dtype)

    def __call__(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        return low_rank(self._dropped(x, rng), self.lora_a[...], self.lora_b[...], self.scale[...])

    def _dropped(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        if self.dropout == 0.0 or rng is None:
            return x
        keep = jax.random.bernoulli(rng, 1.0 - self.dropout, x.shape)
        return jnp.where(keep, x / (1.0 - self.dropout), 0).astype(x.dtype)


class Linear(nnx.Module):
    """y = x W^T + b, plus the adapter's update where there is one. Computes and returns in x's dtype.

    Attributes:
      weight: [*stack, out, in].  bias: [*stack, out] or None.  lora: Lora or None.
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
        self.weight = nnx.Param(normal(rngs, (*stack, out_features, in_features), param_dtype))
        self.bias = nnx.data(nnx.Param(jnp.zeros((*stack, out_features), param_dtype)) if bias else None)
        self.lora: Lora | None = nnx.data(None)

    def __call__(self, x: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        y = matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        if self.lora is not None:
            y = y + self.lora(x, rng)
        return y


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

    def __call__(self, ids: jax.Array, dtype: Any) -> jax.Array:
        rows = self.weight[...][ids].astype(dtype)
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
        x32 = x.astype(jnp.float32)
        normalised = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return self.weight[...].astype(x.dtype) * normalised.astype(x.dtype)


@jax.custom_vjp
def low_rank(x: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array) -> jax.Array:
    """scale * (x A^T) B^T in x's dtype.

    With h = scale x A^T and dh = scale dy B the gradients are dx = dh A, dA = dh^T x, dB = dy^T h. Only x is kept; h is
    computed again. dB is formed as (h^T dy)^T: the large dy then is read as it lies, where XLA would otherwise
    transpose it, and with it whatever it fuses into dy (on a CPU a quarter of the whole step). dA and dB are summed in
    float32 over all tokens. `scale` gets no gradient.

    Args:
      x: [..., in].  lora_a: [R, in].  lora_b: [out, R].  scale: scalar.
    Returns: [..., out].
    """
    return matmul((matmul(x, lora_a) * scale).astype(x.dtype), lora_b)


def _low_rank_forward(x: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array) -> Any:
    return low_rank(x, lora_a, lora_b, scale), (x, lora_a, lora_b, scale)


def _low_rank_backward(residuals: Any, dy: jax.Array) -> Any:
    x, lora_a, lora_b, scale = residuals
    rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    hidden = (matmul(rows, lora_a) * scale).astype(x.dtype)
    dhidden = (_dot(drows, lora_b.astype(x.dtype), 1, 0, x.dtype) * scale).astype(x.dtype)
    dx = _dot(dhidden, lora_a.astype(x.dtype), 1, 0, x.dtype).reshape(x.shape)
    da = _dot(dhidden, rows, 0, 0, jnp.float32).astype(lora_a.dtype)
    db = _dot(hidden, drows, 0, 0, jnp.float32).T.astype(lora_b.dtype)
    return dx, da, db, None


low_rank.defvjp(_low_rank_forward, _low_rank_backward)


def matmul(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """x W^T, accumulated in float32.

    Args:
      x: [..., in].  weight: [out, in], read in x's dtype.
      dtype: of the result; None means x's.
    Returns: [..., out].
    """
    return _dot(x, weight.astype(x.dtype), x.ndim - 1, 1, x.dtype if dtype is None else dtype)


def _dot(left: jax.Array, right: jax.Array, left_dim: int, right_dim: int, dtype: Any) -> jax.Array:
    # On a GPU plain float32 products would be rounded to TF32; people who ask for float32 mean it.
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dimensions = (((left_dim,), (right_dim,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=dtype)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random initial weights, standard deviation 0.02."""
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * _INIT_STDDEV).astype(dtype)

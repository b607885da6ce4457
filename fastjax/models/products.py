"""Products with float weights that accumulate in float32, and a low-rank product with its backward written out."""

from typing import Any

import jax
import jax.numpy as jnp


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

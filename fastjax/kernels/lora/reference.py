"""A linear layer with a low-rank adapter in plain jnp: the definition of right.

y  = x . W^T + scale (x . A^T) . B^T          W [out, in] frozen, A [R, in], B [out, R]
t  = scale dy . B
dx = dy . W + t . A        dA = t^T . x        dB = scale dy^T . (x . A^T)
"""

import jax

from fastjax.kernels.nf4.reference import dequantize_reference
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.reference import product


def lora_matmul_reference(
    x: jax.Array, weight: jax.Array | QuantizedWeight, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array
) -> jax.Array:
    """x [M, in] to [M, out] in x's dtype; A and B are read in x's dtype, the scale multiplies B."""
    matrix = dequantize_reference(weight, x.dtype) if isinstance(weight, QuantizedWeight) else weight.astype(x.dtype)
    low_rank = product(product(x, lora_a.astype(x.dtype)), (scale * lora_b).astype(x.dtype))
    return product(x, jax.lax.stop_gradient(matrix)) + low_rank

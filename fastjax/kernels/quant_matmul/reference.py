"""The product with a 4-bit weight in plain jnp: the definition of right.

y  = x . W^T          W = dequantize(weight)
dx = dy . W           no gradient for W
"""

import jax
import jax.numpy as jnp

from fastjax.kernels.nf4.reference import dequantize_reference
from fastjax.kernels.nf4.weight import QuantizedWeight


def quant_matmul_reference(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """x [M, in] . W^T with W in x's dtype, sums in float32, [M, out] in x's dtype."""
    return product(x, jax.lax.stop_gradient(dequantize_reference(weight, x.dtype)))


def product(x: jax.Array, matrix: jax.Array, *, transposed: bool = True) -> jax.Array:
    """x . matrix^T (or x . matrix), sums in float32; float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, matrix, (((1,), (1 if transposed else 0,)), ((), ())), precision=precision)

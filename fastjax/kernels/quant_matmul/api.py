"""The public function: input checks, choice of implementation, and the gradient."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.nf4.api import check_one_layer, dequantize
from fastjax.kernels.nf4.tables import BLOCK_SIZE
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.blocks import fused_is_faster
from fastjax.kernels.quant_matmul.pallas_triton import quant_matmul_gradient_pallas, quant_matmul_pallas
from fastjax.kernels.quant_matmul.reference import product, quant_matmul_reference


def quant_matmul(
    x: Float[Array, "*rows in"],
    weight: QuantizedWeight,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows out"]:
    """The product of x with a 4-bit weight: y = x . W^T with W = dequantize(weight), and dx = dy . W.

    Sums are float32; the output has x's dtype. W gets no gradient, and the backward keeps only the weight.

    Args:
      x: [..., in] float.
      weight: one layer's QuantizedWeight of shape (out, in).
      implementation: "pallas_triton" decodes inside the product's kernel; "dequantize" writes W in x's dtype and leaves
        the product to XLA; "reference" is the same in plain jnp. None takes the fastest that can run here, by
        measurement; a name is used or fails.
      interpret: run Pallas kernels in jax's interpreter, on any device.
    Returns: [..., out] in x's dtype.
    Raises: ValueError for shapes that do not fit or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    Source: QLoRA (arXiv:2305.14314), equation 5, without its adapter.
    """
    check_one_layer(weight)
    if x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {x.shape} and weight {weight.shape}: expected [..., in] and (out, in)")
    rows = x.reshape(-1, x.shape[-1])
    implementation = choose("quant_matmul", implementation, implementations(rows, weight, interpret))
    return _quant_matmul(rows, weight, implementation, interpret).reshape(*x.shape[:-1], weight.shape[0])


def implementations(x: jax.Array, weight: QuantizedWeight, interpret: bool) -> dict[str, str | None]:
    """Name -> why it cannot run here, or None; the faster first. x is [M, in]."""
    reason = triton_reason(interpret)
    fused = reason
    if weight.shape[1] % BLOCK_SIZE != 0:
        fused = f"takes `in` in multiples of {BLOCK_SIZE}; this weight has in={weight.shape[1]}"
    elif x.dtype == jnp.float32 and weight.dtype != jnp.float32:
        fused = f"does not round what it decodes to {weight.dtype}, as float32 x over a weight of that dtype would show"
    reasons: dict[str, str | None] = {"pallas_triton": fused, "dequantize": reason, "reference": None}
    if not fused_is_faster(len(x)):
        reasons = {"dequantize": reason, "pallas_triton": fused, "reference": None}
    return reasons


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _quant_matmul(x: jax.Array, weight: QuantizedWeight, implementation: str, interpret: bool) -> jax.Array:
    if implementation == "pallas_triton":
        return quant_matmul_pallas(x, weight, interpret=interpret)
    if implementation == "reference":
        return quant_matmul_reference(x, weight)
    return product(x, dequantize(weight, x.dtype, implementation="pallas_triton", interpret=interpret))


def _forward(x, weight, implementation, interpret):
    return _quant_matmul(x, weight, implementation, interpret), weight


def _backward(implementation, interpret, weight, dout):
    if implementation == "pallas_triton":
        return quant_matmul_gradient_pallas(dout, weight, interpret=interpret), None
    of_weight = "reference" if implementation == "reference" else "pallas_triton"
    matrix = dequantize(weight, dout.dtype, implementation=of_weight, interpret=interpret)
    return product(dout, matrix, transposed=False).astype(jnp.result_type(dout)), None


_quant_matmul.defvjp(_forward, _backward)

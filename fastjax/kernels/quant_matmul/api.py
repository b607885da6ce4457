"""The public function: input checks, choice of implementation, and the gradient."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.nf4.api import check_one_layer, dequantize
from fastjax.kernels.nf4.pallas_triton import dequantize_joined
from fastjax.kernels.nf4.tables import BLOCK_SIZE
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.blocks import fused_is_faster
from fastjax.kernels.quant_matmul.pallas_triton import quant_matmul_gradient_pallas, quant_matmul_pallas
from fastjax.kernels.quant_matmul.reference import product, quant_matmul_reference


def quant_matmul(
    x: Float[Array, "*rows in"],
    weight: QuantizedWeight | Sequence[QuantizedWeight],
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows out"] | tuple[Float[Array, "*rows out"], ...]:
    """The product of x with a 4-bit weight, or with several: y = x . W^T with W = dequantize(weight), and dx = dy . W.

    Sums are float32; the output has x's dtype. W gets no gradient, and the backward keeps only the weights.

    Args:
      x: [..., in] float.
      weight: one layer's QuantizedWeight of shape (out, in); or a sequence of them, projections of the same x.
      implementation: "pallas_triton" decodes inside the product's kernel, one weight after the other; "dequantize"
        writes W in x's dtype, several weights below one another, and leaves one product to XLA; "reference" is the same
        in plain jnp. None takes the fastest that can run here, by measurement; a name is used or fails.
      interpret: run Pallas kernels in jax's interpreter, on any device.
    Returns: [..., out] in x's dtype; a tuple of them for a sequence of weights.
    Raises: ValueError for shapes that do not fit or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    Source: QLoRA (arXiv:2305.14314), equation 5, without its adapter.
    """
    weights = tuple(weight) if isinstance(weight, Sequence) else (weight,)
    if not weights:
        raise ValueError("an empty sequence of weights; give at least one")
    for each in weights:
        check_one_layer(each)
        if x.ndim < 1 or x.shape[-1] != each.shape[1]:
            raise ValueError(f"x {x.shape} and weight {each.shape}: expected [..., in] and (out, in)")
    rows = x.reshape(-1, x.shape[-1])
    implementation = choose("quant_matmul", implementation, implementations(rows, weights, interpret))
    outputs = _quant_matmul(rows, weights, implementation, interpret)
    shaped = tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in outputs)
    return shaped if isinstance(weight, Sequence) else shaped[0]


def implementations(x: jax.Array, weights: tuple[QuantizedWeight, ...], interpret: bool) -> dict[str, str | None]:
    """Name -> why it cannot run here, or None; the faster first. x is [M, in]."""
    reason = triton_reason(interpret)
    fused = reason
    num_in = x.shape[1]
    narrow = [weight.dtype for weight in weights if weight.dtype != jnp.float32]
    if num_in % BLOCK_SIZE != 0:
        fused = f"takes `in` in multiples of {BLOCK_SIZE}; this weight has in={num_in}"
    elif x.dtype == jnp.float32 and narrow:
        fused = f"does not round what it decodes to {narrow[0]}, as float32 x over a weight of that dtype would show"
    reasons: dict[str, str | None] = {"pallas_triton": fused, "dequantize": reason, "reference": None}
    if not fused_is_faster(len(x)):
        reasons = {"dequantize": reason, "pallas_triton": fused, "reference": None}
    return reasons


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _quant_matmul(x, weights, implementation: str, interpret: bool) -> tuple[jax.Array, ...]:
    if implementation == "pallas_triton":
        return tuple(quant_matmul_pallas(x, weight, interpret=interpret) for weight in weights)
    if implementation == "reference":
        return tuple(quant_matmul_reference(x, weight) for weight in weights)
    return tuple(jnp.split(product(x, _joined(weights, x.dtype, implementation, interpret)), _ends(weights), axis=1))


def _joined(weights, dtype: jnp.dtype, implementation: str, interpret: bool) -> jax.Array:
    """The dequantised weights below one another."""
    if implementation == "dequantize" and len(weights) > 1 and weights[0].shape[1] % BLOCK_SIZE == 0:
        return dequantize_joined(weights, dtype, interpret=interpret)
    of_weight = "reference" if implementation == "reference" else "pallas_triton"
    matrices = [dequantize(weight, dtype, implementation=of_weight, interpret=interpret) for weight in weights]
    return matrices[0] if len(matrices) == 1 else jnp.concatenate(matrices)


def _ends(weights) -> list[int]:
    """Where one weight's rows end and the next one's begin."""
    return np.cumsum([weight.shape[0] for weight in weights])[:-1].tolist()


def _forward(x, weights, implementation, interpret):
    return _quant_matmul(x, weights, implementation, interpret), weights


def _backward(implementation, interpret, weights, douts):
    dtype = jnp.result_type(douts[0])
    if implementation == "pallas_triton":
        parts = [
            quant_matmul_gradient_pallas(dout, weight, interpret=interpret)
            for dout, weight in zip(douts, weights, strict=True)
        ]
        total = parts[0].astype(jnp.float32)
        for part in parts[1:]:
            total = total + part.astype(jnp.float32)
        return total.astype(dtype), None
    dout = douts[0] if len(douts) == 1 else jnp.concatenate(douts, axis=1)
    return product(dout, _joined(weights, dtype, implementation, interpret), transposed=False).astype(dtype), None


_quant_matmul.defvjp(_forward, _backward)

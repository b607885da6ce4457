"""The public functions: input checks and choice of implementation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.nf4.pallas_triton import dequantize_pallas, quantize_pallas
from fastjax.kernels.nf4.reference import dequantize_reference, quantize_reference
from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES
from fastjax.kernels.nf4.weight import QuantizedWeight

_quantize_reference = jax.jit(quantize_reference, static_argnames=("quant_type", "nested"))
_dequantize_reference = jax.jit(dequantize_reference, static_argnums=1)
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def quantize(
    weight: Float[Array, "out in"],
    *,
    quant_type: str = "nf4",
    nested: bool = True,
    implementation: str | None = None,
    interpret: bool = False,
) -> QuantizedWeight:
    """The 4-bit form of a weight, in blocks of 64, with the bytes that bitsandbytes 0.50 gives on a CPU.

    code[i] = nearest table entry of weight[i] / max |weight| over the block; the equations stand in `reference`.
    One pass over the weight. There is no gradient.

    Args:
      weight: [out, in], bfloat16, float16 or float32.
      quant_type: "nf4" or "fp4".
      nested: whether the block scales are coded in 8 bits ("double quantisation").
      implementation: "pallas_triton" or "reference"; None takes the first that can run here, a name is used or fails.
      interpret: run the Pallas kernel in jax's interpreter, on any device.
    Raises: ValueError for another shape, dtype or quant_type, or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    Source: QLoRA (arXiv:2305.14314), section 3. Where torch's mean depends on the number of its threads (weights of
      2 million elements and more), this is its result with one thread.
    """
    if weight.ndim != 2 or weight.size == 0:
        raise ValueError(f"weight {weight.shape}: expected [out, in] with at least one element")
    if weight.dtype not in _DTYPES:
        raise ValueError(f"weight is {weight.dtype}; 4-bit quantisation takes bfloat16, float16 or float32")
    if quant_type not in CODES:
        raise ValueError(f"quant_type={quant_type!r} is unknown; known: {', '.join(CODES)}")
    reasons = {"pallas_triton": triton_reason(interpret), "reference": None}
    if choose("nf4.quantize", implementation, reasons) == "reference":
        return _quantize_reference(weight, quant_type=quant_type, nested=nested)
    return quantize_pallas(weight, quant_type=quant_type, nested=nested, interpret=interpret)


def dequantize(
    weight: QuantizedWeight,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "out in"]:
    """The [out, in] matrix that a 4-bit weight stands for: table[code] * scale in float32, rounded to weight.dtype.

    Args:
      weight: one layer's QuantizedWeight.
      dtype: bfloat16, float16 or float32, to which the values are cast in turn; None takes weight.dtype.
      implementation: "pallas_triton" or "reference"; None takes the first that can run here, a name is used or fails.
      interpret: run the Pallas kernel in jax's interpreter, on any device.
    Raises: ValueError for a weight that breaks its invariants, a stacked weight, another dtype, or an unknown
      `implementation`; NotImplementedError if `implementation` cannot run here.
    Source: as `quantize`; bit-equal to bitsandbytes' CPU library, but for one fault of it: where out*in is a multiple
      of 64 and `in` of 16 only, bitsandbytes 0.50 takes wrong block scales on CPUs with AVX-512.
    """
    check_one_layer(weight)
    dtype = jnp.dtype(dtype or weight.dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype} must be bfloat16, float16 or float32")
    reasons = {"pallas_triton": triton_reason(interpret), "reference": None}
    if choose("nf4.dequantize", implementation, reasons) == "reference":
        return _dequantize_reference(weight, dtype)
    return dequantize_pallas(weight, dtype, interpret=interpret)


def check_one_layer(weight: QuantizedWeight) -> None:
    """Raises: ValueError for a weight that breaks its invariants, or a stack without a chosen layer."""
    weight.check()
    if weight.layer is None and weight.codes.ndim != (2 if weight.shape[1] % BLOCK_SIZE == 0 else 1):
        raise ValueError(f"codes {weight.codes.shape} hold {weight.codes.shape[0]} layers; take one, weight.at(i)")

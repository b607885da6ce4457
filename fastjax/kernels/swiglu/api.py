"""The public function: input checks and choice of implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.swiglu.pallas_triton import swiglu_pallas
from fastjax.kernels.swiglu.reference import swiglu_reference


def swiglu(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"],
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows F"]:
    """silu(gate) * up, computed in float32 and rounded once to gate's dtype.

    The backward keeps gate and up, and computes the activation again.

    Args:
      gate, up: [..., F] float of one dtype.
      implementation: "reference", which XLA makes one pass of, too, and fuses with its neighbours; or "pallas_triton".
        None takes the first, a name is used or fails.
      interpret: run the Pallas kernels in jax's interpreter, on any device.
    Returns: [..., F] in gate's dtype.
    Raises: ValueError for shapes or dtypes that differ or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    Source: arXiv:2002.05202.
    """
    if gate.ndim < 1 or (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(f"gate {gate.dtype} {gate.shape} and up {up.dtype} {up.shape} must be of one shape and dtype")
    reasons = {"reference": None, "pallas_triton": triton_reason(interpret)}
    if choose("swiglu", implementation, reasons) == "reference":
        return swiglu_reference(gate, up)
    shape = (-1, gate.shape[-1])
    return swiglu_pallas((gate.reshape(shape), up.reshape(shape)), interpret).reshape(gate.shape)


def swiglu_joined(
    joined: Float[Array, "*rows twice_F"], *, implementation: str | None = None, interpret: bool = False
) -> Float[Array, "*rows F"]:
    """`swiglu` of gate and up side by side, as one matmul writes them: the gradient is written side by side, too.

    Args:
      joined: [..., 2 F] float: F columns of gate, then F of up.
      implementation: "pallas_triton" or "reference". None takes the first that can run here, a name is used or fails.
      interpret: see `swiglu`.
    Returns: [..., F] in joined's dtype.
    Raises: ValueError for an odd number of columns or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    """
    if joined.ndim < 1 or joined.shape[-1] % 2:
        raise ValueError(f"joined {joined.shape} must have an even number of columns, those of gate and those of up")
    reasons = {"pallas_triton": triton_reason(interpret), "reference": None}
    if choose("swiglu_joined", implementation, reasons) == "reference":
        return swiglu_reference(*jnp.split(joined, 2, axis=-1))
    y = swiglu_pallas((joined.reshape(-1, joined.shape[-1]),), interpret)
    return y.reshape(*joined.shape[:-1], -1)

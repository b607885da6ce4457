"""The public functions: input checks."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from fastjax.kernels.quantized_state.reference import absmax_shape, dequantize_reference, quantize_reference


def quantize_state(
    values: Float[Array, "*shape"], *, signed: bool, num_stacked: int = 0
) -> tuple[UInt8[Array, "*shape"], Float[Array, "*blocks"]]:
    """The 8-bit form of a moment: the nearest entry of the dynamic map to values / max |values| over a block of 256.

    Blocks run over the row-major flattened values of each of the stacked tensors. An all-zero block has scale 0 and
    codes of 0.0.

    Args:
      values: [*stack, *shape] float.
      signed: the signed map (first moment) or the unsigned one of twice the resolution (second moment, >= 0).
      num_stacked: how many leading dimensions only stack tensors; no block spans two of them.
    Returns: codes uint8 in values' shape; scales float32, in the order of the blocks (see `absmax_shape`).
    Raises: ValueError for values without any block, or num_stacked out of range.
    Source: 8-bit optimizers via block-wise quantization (arXiv:2110.02861), sections 2 and 3. Nearest entry, as in
      bitsandbytes' Triton kernel; its CPU library rounds through a table of 65536 even steps, which has no place for
      entries below 1.5e-5.
    """
    _check(values.shape, num_stacked)
    return quantize_reference(values, signed, num_stacked)


def dequantize_state(
    codes: UInt8[Array, "*shape"], absmax: Float[Array, "*blocks"], *, signed: bool, num_stacked: int = 0
) -> Float[Array, "*shape"]:
    """The float32 values that an 8-bit moment stands for: map[code] * scale of its block.

    Args: as `quantize_state` returns and takes them.
    Raises: ValueError for codes that are not uint8, or scales of another shape than theirs.
    """
    _check(codes.shape, num_stacked)
    if codes.dtype != jnp.uint8:
        raise ValueError(f"codes are {codes.dtype}; they must be uint8")
    expected = absmax_shape(codes.shape, num_stacked)
    if absmax.shape != expected:
        raise ValueError(f"absmax {absmax.shape} does not fit codes {codes.shape}: expected {expected}")
    return dequantize_reference(codes, absmax, signed, num_stacked)


def _check(shape: tuple[int, ...], num_stacked: int) -> None:
    if not 0 <= num_stacked < len(shape) or 0 in shape:
        raise ValueError(
            f"values {shape} with num_stacked={num_stacked}: expected at least one dimension behind the stacked ones, "
            "and at least one element"
        )

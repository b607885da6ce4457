"""The public functions: input checks and choice of implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.int_blocks.pallas_triton import quantize_pallas, sum_pallas
from fastjax.kernels.int_blocks.reference import BLOCK_SIZE, LARGEST, quantize_reference, sum_reference


def packed_width(num: int, bits: int) -> int:
    """The bytes of the codes of so many numbers."""
    return num * bits // 8


def quantize_int_blocks(
    values: Float[Array, " L"], bits: int, *, implementation: str | None = None, interpret: bool = False
) -> tuple[Int8[Array, " C"], Float[Array, " G"], Float[Array, " L"]]:
    """Whole numbers of `bits` bits, a scale for each block of 256 of them, and what they leave over.

    With q = 2^(bits - 1) - 1 and m the largest magnitude of a block:  scale = m / q,  code = floor(x / scale + 1/2),
    error = x - code scale, whose magnitude is at most m / (2 q). A block of zeros has scale 0; one with a number that
    is not finite has scale NaN. Computed in float32.

    Args:
      values: [L], L a multiple of 256.
      bits: 8, or 4: byte j of a block then holds number j in its low nibble and number j + 128 in its high one.
      implementation: "pallas_triton", one pass over memory; or "reference". None takes the first that can run here, a
        name is used or fails.
      interpret: run the Pallas kernel in jax's interpreter, on any device.
    Returns: codes [L * bits / 8] int8; scales [L / 256] float32; error [L] float32.
    Raises: ValueError for values that make no whole blocks, other bits, or an unknown `implementation`;
      NotImplementedError if `implementation` cannot run here.
    Source: block-wise quantisation of arXiv:2110.02861, section 2.1, with evenly spaced codes.
    """
    _check_bits(bits)
    if values.ndim != 1 or values.size == 0 or values.size % BLOCK_SIZE:
        raise ValueError(f"values {values.shape} make no whole blocks; pad them to [a multiple of {BLOCK_SIZE}]")
    if _choose(implementation, interpret) == "reference":
        return quantize_reference(values, bits)
    return quantize_pallas(values, bits, interpret)


def sum_int_blocks(
    codes: Int8[Array, "P C"],
    scales: Float[Array, "P G"],
    bits: int,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, " L"]:
    """sum_p code_p scale_p over P parts in float32: what they stand for, added up in the order of the parts.

    Args:
      codes: [P, L * bits / 8] int8, each row as `quantize_int_blocks` gives it.
      scales: [P, L / 256] float32.
      bits, implementation, interpret: as there.
    Returns: [L] float32.
    Raises: ValueError for codes and scales that do not fit each other, other bits, or an unknown `implementation`;
      NotImplementedError if `implementation` cannot run here.
    """
    _check_bits(bits)
    if codes.dtype != jnp.int8 or codes.ndim != 2 or scales.ndim != 2:
        raise ValueError(
            f"codes {codes.dtype} {codes.shape} and scales {scales.shape}: expected int8 [P, C] and [P, G]"
        )
    expected = (scales.shape[0], packed_width(scales.shape[1] * BLOCK_SIZE, bits))
    if codes.shape != expected:
        raise ValueError(f"codes {codes.shape} do not fit scales {scales.shape} at {bits} bits: expected {expected}")
    if _choose(implementation, interpret) == "reference":
        return sum_reference(codes, scales, bits)
    return sum_pallas(codes, scales, bits, interpret)


def _choose(implementation: str | None, interpret: bool) -> str:
    reasons = {"pallas_triton": triton_reason(interpret), "reference": None}
    return choose("int_blocks", implementation, reasons)


def _check_bits(bits: int) -> None:
    if bits not in LARGEST:
        raise ValueError(f"bits={bits}; it must be one of {', '.join(map(str, LARGEST))}")

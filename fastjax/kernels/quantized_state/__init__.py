"""Optimiser moments in 8 bits."""

from fastjax.kernels.quantized_state.api import dequantize_state, quantize_state

__all__ = ["dequantize_state", "quantize_state"]

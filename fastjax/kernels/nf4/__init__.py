"""4-bit weights (NF4 and FP4) in bitsandbytes' bytes: quantise and dequantise."""

from fastjax.kernels.nf4.api import dequantize, quantize
from fastjax.kernels.nf4.weight import QuantizedWeight, abstract_weight, packed_shapes

__all__ = ["QuantizedWeight", "abstract_weight", "dequantize", "packed_shapes", "quantize"]

"""Matrix product with a 4-bit weight."""

from fastjax.kernels.quant_matmul.api import quant_matmul

__all__ = ["quant_matmul"]

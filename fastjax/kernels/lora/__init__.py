"""A linear layer with a low-rank adapter, over a 4-bit or a 16-bit weight."""

from fastjax.kernels.lora.api import lora_matmul

__all__ = ["lora_matmul"]

"""Scaled dot-product attention with causal, window and segment masks."""

from fastjax.kernels.attention.api import attention

__all__ = ["attention"]

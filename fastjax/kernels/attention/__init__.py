"""Scaled dot-product attention with causal, window and segment masks."""

from fastjax.kernels.attention.api import attention
from fastjax.kernels.attention.bounds import make_tile_bounds

__all__ = ["attention", "make_tile_bounds"]

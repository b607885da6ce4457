"""Scaled dot-product attention with causal, window and segment masks."""

from fastjax.kernels.attention.api import attention
from fastjax.kernels.attention.bounds import make_tile_bounds
from fastjax.kernels.attention.sharded import sharded_attention

__all__ = ["attention", "make_tile_bounds", "sharded_attention"]

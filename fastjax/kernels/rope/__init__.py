"""Rotary positions on queries and keys."""

from fastjax.kernels.rope.api import rope

__all__ = ["rope"]

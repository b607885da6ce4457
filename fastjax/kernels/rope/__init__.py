"""Rotary positions on queries and keys."""

from fastjax.kernels.rope.api import rope, rope_joined

__all__ = ["rope", "rope_joined"]

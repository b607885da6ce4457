"""The gated activation between an MLP's projections."""

from fastjax.kernels.swiglu.api import swiglu, swiglu_joined

__all__ = ["swiglu", "swiglu_joined"]

"""The gated activation between an MLP's projections."""

from fastjax.kernels.swiglu.api import swiglu

__all__ = ["swiglu"]

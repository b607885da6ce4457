"""RMSNorm, alone or of a sum with a residual."""

from fastjax.kernels.rms_norm.api import rms_norm

__all__ = ["rms_norm"]

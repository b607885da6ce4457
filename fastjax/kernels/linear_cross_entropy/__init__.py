"""Cross-entropy of a linear head, without ever holding all logits."""

from fastjax.kernels.linear_cross_entropy.api import linear_cross_entropy

__all__ = ["linear_cross_entropy"]

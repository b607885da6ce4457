"""Numbers in blocks of small integers, as gradients travel between devices."""

from fastjax.kernels.int_blocks.api import packed_width, quantize_int_blocks, sum_int_blocks

__all__ = ["packed_width", "quantize_int_blocks", "sum_int_blocks"]

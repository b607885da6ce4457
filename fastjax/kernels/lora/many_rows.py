"""Adapters over joined 4-bit weights for many rows: one matmul for all projections of the same x.

Forward: the weights are decoded into one buffer. Either B stands in further columns of it and x . A in further columns
of x, and one matmul does all; or the adapter's product is added afterwards. Backward: the buffer holds W + B . A (see
`pallas_triton`), and the two skinny products of dy and of x are one matmul each for all projections. Only x is kept.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fastjax.kernels.lora.blocks import columns_are_cheaper, one_pass_rank
from fastjax.kernels.lora.pallas_triton import gradient_products, weights_plus_adapters
from fastjax.kernels.nf4.pallas_triton import dequantize_joined
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.reference import product

# A multiple of it keeps the rows of a bfloat16 matrix on boundaries of 128 bytes.
_COLUMN_MULTIPLE = 64


def block_diagonal(lora_b: Sequence[jax.Array], ranks: Sequence[int], dtype: jnp.dtype) -> jax.Array:
    """[sum out, sum ranks]: B_i on the diagonal, each padded to its rank."""
    rows, first = [], 0
    for b, rank in zip(lora_b, ranks, strict=True):
        rows.append(jnp.pad(b.astype(dtype), ((0, 0), (first, sum(ranks) - first - b.shape[1]))))
        first += rank
    return jnp.concatenate(rows)


def joined_forward(
    x: jax.Array,
    weights: Sequence[QuantizedWeight],
    lora_a: Sequence[jax.Array],
    lora_b: Sequence[jax.Array],
    interpret: bool,
) -> jax.Array:
    """[M, sum out]; lora_b includes the scale."""
    num_rows, num_in = x.shape
    xa, ranks = _low_rank(x, lora_a)
    b = block_diagonal(lora_b, ranks, x.dtype)
    if not columns_are_cheaper(num_in, len(b)):
        return product(x, dequantize_joined(weights, x.dtype, interpret=interpret)) + product(xa, b)
    extra = -(-xa.shape[1] // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
    padding = ((0, 0), (0, extra - xa.shape[1]))
    matrix = dequantize_joined(weights, x.dtype, extra_columns=extra, interpret=interpret)
    matrix = jax.lax.dynamic_update_slice(matrix, jnp.pad(b, padding), (0, num_in))
    return product(jnp.concatenate([x, jnp.pad(xa, padding)], axis=1), matrix)


def joined_backward(
    dout: jax.Array,
    x: jax.Array,
    weights: Sequence[QuantizedWeight],
    lora_a: Sequence[jax.Array],
    lora_b: Sequence[jax.Array],
    interpret: bool,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """(dx, float32 dA_i, float32 dB_i of the B_i that include the scale) for dout [M, sum out]."""
    dx = product(dout, weights_plus_adapters(weights, lora_a, lora_b, x.dtype, interpret=interpret), transposed=False)
    xa, ranks = _low_rank(x, lora_a)
    if rank := one_pass_rank(max(map(len, lora_a)), x.dtype):
        b = jnp.concatenate([_padded(one_b, 1, rank) for one_b in lora_b]).astype(x.dtype)
        t, db = gradient_products(dout, xa, b, [len(one_b) for one_b in lora_b], interpret=interpret)
    else:
        t = product(dout, block_diagonal(lora_b, ranks, x.dtype), transposed=False)
        db = transposed_product(dout, xa)
    da = transposed_product(t, x)
    das, dbs, row, column = [], [], 0, 0
    for one_a, one_b, one_rank in zip(lora_a, lora_b, ranks, strict=True):
        das.append(da[column : column + len(one_a)])
        first = 0 if rank else column
        dbs.append(db[row : row + len(one_b), first : first + len(one_a)])
        row, column = row + len(one_b), column + one_rank
    return dx, das, dbs


def _low_rank(x: jax.Array, lora_a: Sequence[jax.Array]) -> tuple[jax.Array, list[int]]:
    """x . A of all projections side by side, and how many columns each has, padding included."""
    rank = one_pass_rank(max(map(len, lora_a)), x.dtype)
    ranks = [rank or len(a) for a in lora_a]
    a = jnp.concatenate([_padded(a, 0, columns) for a, columns in zip(lora_a, ranks, strict=True)])
    return product(x, a.astype(x.dtype)), ranks


def _padded(array: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros at the end of the axis up to this size."""
    padding = [(0, 0), (0, 0)]
    padding[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, padding)


def transposed_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a^T . b as float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

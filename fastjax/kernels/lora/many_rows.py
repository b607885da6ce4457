"""Adapters over joined 4-bit weights for many rows: one matmul for all projections of the same x.

Forward: the weights are decoded into one buffer. Either B stands in further columns of it and x . A in further columns
of x, and one matmul does all; or the adapter's product is added afterwards. Backward: the buffer holds W + B . A (see
`pallas_triton`), and the two skinny products of dy and of x are one matmul each for all projections. Only x is kept.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fastjax.kernels.lora.blocks import columns_are_cheaper
from fastjax.kernels.lora.pallas_triton import weights_plus_adapters
from fastjax.kernels.nf4.pallas_triton import dequantize_joined
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.reference import product

# A multiple of it keeps the rows of a bfloat16 matrix on boundaries of 128 bytes.
_COLUMN_MULTIPLE = 64


def block_diagonal(lora_b: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """[sum out, sum R]: B_i on the diagonal."""
    rank = sum(b.shape[1] for b in lora_b)
    rows, first = [], 0
    for b in lora_b:
        rows.append(jnp.pad(b.astype(dtype), ((0, 0), (first, rank - first - b.shape[1]))))
        first += b.shape[1]
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
    xa = product(x, jnp.concatenate(lora_a).astype(x.dtype))
    b = block_diagonal(lora_b, x.dtype)
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
    a = jnp.concatenate(lora_a).astype(x.dtype)
    t = product(dout, block_diagonal(lora_b, x.dtype), transposed=False)
    dx = product(dout, weights_plus_adapters(weights, lora_a, lora_b, x.dtype, interpret=interpret), transposed=False)
    da, db = transposed_product(t, x), transposed_product(dout, product(x, a))
    das, dbs, row, column = [], [], 0, 0
    for one_a, one_b in zip(lora_a, lora_b, strict=True):
        rank, num_out = len(one_a), len(one_b)
        das.append(da[column : column + rank])
        dbs.append(db[row : row + num_out, column : column + rank])
        row, column = row + num_out, column + rank
    return dx, das, dbs


def transposed_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a^T . b as float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

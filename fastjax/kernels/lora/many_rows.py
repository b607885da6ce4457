"""Adapters over joined 4-bit weights for many rows: one matmul for all projections of the same x.

Forward: the weights are decoded into one buffer. Either B stands in further columns of it and x . A in further columns
of x, and one matmul does all; or the adapter's product is added afterwards. Backward: the buffer holds W + B . A, and
dy is read once for its two skinny products (see `pallas_triton_backward`).

Adapters come joined: A [projections * R, in] and B [sum out, R], each padded with zeros to the common rank R.
"""

from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp

from fastjax.kernels.lora.blocks import columns_are_cheaper, one_pass_over_gradient, one_pass_over_input, padded_rank
from fastjax.kernels.lora.pallas_triton_backward import gradient_products, weights_plus_adapters
from fastjax.kernels.lora.pallas_triton_forward import add_product, with_columns
from fastjax.kernels.nf4.pallas_triton import dequantize_joined
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.reference import product

# A multiple of it keeps the rows of a bfloat16 matrix on boundaries of 128 bytes.
_COLUMN_MULTIPLE = 64


def joined_adapters(
    lora_a: Sequence[jax.Array], lora_b: Sequence[jax.Array], dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """(A, B) as the functions below take them, in this dtype."""
    rank = padded_rank(max(map(len, lora_a)))
    a = [jnp.pad(a, ((0, rank - len(a)), (0, 0))) for a in lora_a]
    b = [jnp.pad(b, ((0, 0), (0, rank - b.shape[1]))) for b in lora_b]
    return jnp.concatenate(a).astype(dtype), jnp.concatenate(b).astype(dtype)


def block_diagonal(lora_b: jax.Array, outs: Sequence[int], num_columns: int) -> jax.Array:
    """[sum out, num_columns]: the B of each projection in columns of its own, zeros elsewhere."""
    rank = lora_b.shape[1]
    rows, first = [], 0
    for i, num_out in enumerate(outs):
        rows.append(jnp.pad(lora_b[first : first + num_out], ((0, 0), (i * rank, num_columns - (i + 1) * rank))))
        first += num_out
    return jnp.concatenate(rows)


def joined_forward(
    x: jax.Array, weights: Sequence[QuantizedWeight], lora_a: jax.Array, lora_b: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """(y [M, sum out], x . A [M, projections * R]); lora_b includes the scale."""
    num_in = x.shape[1]
    outs = [weight.shape[0] for weight in weights]
    extra = max(_COLUMN_MULTIPLE, padded_rank(len(lora_a)))
    if not columns_are_cheaper(num_in, len(lora_b)):
        xa = product(x, lora_a)
        y = product(x, dequantize_joined(weights, x.dtype, interpret=interpret))
        padded = jnp.pad(xa, ((0, 0), (0, padded_rank(len(lora_a)) - len(lora_a))))
        return add_product(y, padded, block_diagonal(lora_b, outs, padded.shape[1]), interpret=interpret), xa
    if one_pass_over_input(extra, x.dtype):
        wide, xa = with_columns(x, lora_a, extra, interpret=interpret)
    else:
        xa = product(x, lora_a)
        wide = jnp.concatenate([x, jnp.pad(xa, ((0, 0), (0, extra - len(lora_a))))], axis=1)
    matrix = dequantize_joined(weights, x.dtype, extra_columns=extra, interpret=interpret)
    matrix = jax.lax.dynamic_update_slice(matrix, block_diagonal(lora_b, outs, extra), (0, num_in))
    return product(wide, matrix), xa


def joined_backward(
    dout: jax.Array,
    x: jax.Array,
    xa: jax.Array,
    weights: Sequence[QuantizedWeight],
    lora_a: jax.Array,
    lora_b: jax.Array,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dx, float32 dA, float32 dB), the latter two joined like A and B, for dout [M, sum out]; B includes the scale."""
    outs = [weight.shape[0] for weight in weights]
    dx = product(dout, weights_plus_adapters(weights, lora_a, lora_b, interpret=interpret), transposed=False)
    if one_pass_over_gradient(lora_b.shape[1], x.dtype):
        t, db = gradient_products(dout, xa, lora_b, outs, interpret=interpret)
    else:
        t = product(dout, block_diagonal(lora_b, outs, len(lora_a)), transposed=False)
        rows = jnp.split(transposed_product(dout, xa), list(accumulate(outs[:-1])))
        rank = lora_b.shape[1]
        db = jnp.concatenate([part[:, i * rank : (i + 1) * rank] for i, part in enumerate(rows)])
    return dx, transposed_product(t, x), db


def transposed_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a^T . b as float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

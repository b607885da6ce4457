"""4-bit quantisation in plain jnp, written to be read: the definition of right, bit for bit bitsandbytes'.

absmax_j  = max |w_i| over the 64 elements of block j
code_i    = number of decision bounds below w_i / absmax_j              (on a bound: the lower code)
offset    = mean_j absmax_j
scale_b   = max |absmax_j - offset| over the 256 blocks of nested block b
absmax code_j = nearest dynamic-map code of (absmax_j - offset) / scale_b, through a table of 65536 steps
w_i       = table[code_i] * (nested_table[absmax code_j] * scale_b + offset), rounded to the weight's dtype
"""

import jax
import jax.numpy as jnp

from fastjax.kernels.nf4.tables import (
    BLOCK_SIZE,
    CODES,
    NESTED_BLOCK_SIZE,
    NESTED_STEPS,
    SMALLEST_ABSMAX,
    decision_bounds,
    dynamic_map,
    nested_codes,
)
from fastjax.kernels.nf4.weight import QuantizedWeight, packed_shapes


def decode_absmax(table_value: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """float32 block scale from its table value: the product rounds, then the sum.

    A compiler may contract a product and a sum into one operation that rounds once, and the result then differs from
    bitsandbytes' in the last bit. A maximum between the two, which changes no finite value, forbids that.
    """
    return jnp.maximum(table_value * scale, jnp.finfo(jnp.float32).min) + offset


def block_absmax(weight: QuantizedWeight) -> jax.Array:
    """float32 [blocks]: the scale of every block, in order."""
    absmax = weight.absmax.reshape(-1)
    if weight.nested_scale is None or weight.nested_table is None or weight.nested_offset is None:
        return absmax
    scale = jnp.repeat(weight.nested_scale, NESTED_BLOCK_SIZE)[: absmax.size]
    return decode_absmax(weight.nested_table[absmax.astype(jnp.int32)], scale, weight.nested_offset)


def dequantize_reference(weight: QuantizedWeight, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """See `fastjax.kernels.nf4.dequantize`."""
    weight = weight.one_layer()
    size = weight.shape[0] * weight.shape[1]
    codes = weight.codes.reshape(-1)
    nibbles = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[:size]
    values = jnp.asarray(CODES[weight.quant_type])[nibbles.astype(jnp.int32)]
    absmax = block_absmax(weight)
    if size % BLOCK_SIZE == 0:
        values = (values.reshape(-1, BLOCK_SIZE) * absmax[:, None]).reshape(-1)
    else:
        values = values * jnp.repeat(absmax, BLOCK_SIZE)[:size]
    return values.astype(weight.dtype).astype(dtype or weight.dtype).reshape(weight.shape)


def quantize_reference(
    weight: jax.Array, *, quant_type: str = "nf4", nested: bool = True, dtype: jax.typing.DTypeLike | None = None
) -> QuantizedWeight:
    """See `fastjax.kernels.nf4.quantize`."""
    flat = weight.reshape(-1).astype(jnp.float32)
    num_whole = flat.size // BLOCK_SIZE * BLOCK_SIZE
    whole = flat[:num_whole].reshape(-1, BLOCK_SIZE)
    absmax = jnp.max(jnp.abs(whole), axis=-1, initial=0.0)
    # A zero block divides by the floor and gives zeros. (The floor is subnormal, which a GPU or XLA's CPU backend may
    # flush to zero when it computes: a selection is not a computation.)
    reciprocal = jnp.where(absmax == 0.0, 1e38, 1.0 / absmax)
    scaled = (whole * reciprocal[:, None]).reshape(-1)
    if num_whole < flat.size:
        rest = flat[num_whole:]
        rest_absmax = jnp.max(jnp.abs(rest))
        scaled = jnp.concatenate([scaled, jnp.where(rest_absmax == 0.0, 0.0, rest / rest_absmax)])
        absmax = jnp.append(absmax, jnp.where(rest_absmax == 0.0, jnp.float32(SMALLEST_ABSMAX), rest_absmax))
    bounds, order = decision_bounds(quant_type)
    index = jnp.searchsorted(jnp.asarray(bounds, jnp.float32), jnp.clip(scaled, -1.0, 1.0), side="left")
    codes = jnp.asarray(order, jnp.uint8)[index]
    zero_code = order[sum(bound < 0.0 for bound in bounds)]
    codes = jnp.pad(codes, (0, codes.size % 2), constant_values=zero_code)
    packed = (codes[0::2] << 4) | codes[1::2]
    return assemble(packed, absmax, weight.shape, quant_type, nested, jnp.dtype(dtype or weight.dtype))


def assemble(
    packed: jax.Array, absmax: jax.Array, shape: tuple[int, ...], quant_type: str, nested: bool, dtype: jnp.dtype
) -> QuantizedWeight:
    """A QuantizedWeight from flat codes and flat float32 block scales, which are quantised in turn when nested."""
    num_rows, num_columns = shape
    fields = packed_shapes((num_rows, num_columns), nested=nested)
    scale = offset = table = None
    if nested:
        absmax, scale, offset = quantize_absmax(absmax)
        table = jnp.asarray(dynamic_map())
    return QuantizedWeight(
        codes=packed.reshape(fields["codes"][0]),
        absmax=absmax.reshape(fields["absmax"][0]),
        nested_scale=scale,
        nested_offset=offset,
        nested_table=table,
        shape=(num_rows, num_columns),
        quant_type=quant_type,
        dtype=dtype,
    )


def quantize_absmax(absmax: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(uint8 [blocks] codes, float32 [ceil(blocks / 256)] scales, float32 offset) of float32 [blocks]."""
    num_blocks = absmax.size
    offset = torch_mean(absmax)
    centred = jnp.pad(absmax - offset, (0, -num_blocks % NESTED_BLOCK_SIZE)).reshape(-1, NESTED_BLOCK_SIZE)
    scale = jnp.max(jnp.abs(centred), axis=-1)
    # Scales that are all equal have nothing to code: they get code 0, whose product with a scale of 0 is 0.
    normed = jnp.where(scale[:, None] == 0.0, -1.0, jnp.clip(centred * (1.0 / scale)[:, None], -1.0, 1.0))
    step = ((normed + 1.0) * ((NESTED_STEPS - 1) / 2) + 0.5).astype(jnp.int32)
    return jnp.asarray(nested_codes())[step].reshape(-1)[:num_blocks], scale, offset


def torch_mean(values: jax.Array) -> jax.Array:
    """float32 mean of float32 [n], added in the order in which torch adds on one CPU thread with 8-wide vectors.

    Fewer than 8 values are added as vectors of one.

    Four accumulators of 8 lanes run over the rows; each is a cascade of four levels, a lower level being emptied into
    the next after 2^p rows. (torch splits 32768 elements and more among its threads, so its own last bit depends on
    their number; so does that of its CUDA mean on the GPU.)
    Source: aten/src/ATen/native/cpu/SumKernel.cpp, in words.
    """
    lanes, accumulators = 8 if values.size >= 8 else 1, 4
    num_vectors = values.size // lanes
    vectors = values[: num_vectors * lanes].reshape(num_vectors, lanes)
    num_steps = num_vectors // accumulators
    level_step = 2 ** max(4, (num_steps - 1).bit_length() // 4) if num_steps > 1 else 16
    level = vectors[: num_steps * accumulators].reshape(num_steps, accumulators, lanes)
    total = None
    for is_last in (False, False, False, True):
        num_full = 0 if is_last else len(level) // level_step * level_step
        left_over = _add_in_order(level[num_full:])
        total = left_over if total is None else total + left_over
        full = level[:num_full].reshape(-1, level_step, accumulators, lanes)
        level = _add_in_order(jnp.swapaxes(full, 0, 1))
    assert total is not None
    first = _add_in_order(vectors[num_steps * accumulators :], total[0])
    partial = _add_in_order(total[1:], first)
    tail = _add_in_order(values[num_vectors * lanes :])
    # Behind a barrier, or the compiler turns the division by a constant into a product that rounds otherwise.
    return _add_in_order(partial, tail) / jax.lax.optimization_barrier(jnp.float32(values.size))


def _add_in_order(terms: jax.Array, start: jax.Array | None = None) -> jax.Array:
    """The sum over the first axis, one term after the other."""
    start = jnp.zeros(terms.shape[1:], terms.dtype) if start is None else start
    return jax.lax.fori_loop(0, len(terms), lambda i, total: total + terms[i], start) if len(terms) else start

"""4-bit quantisation as Pallas-Triton kernels, and the decoding that other kernels build on.

A program owns whole quantisation blocks; weights are seen flat, so that any shape works. One byte holds two weights,
and the values of both come from float32 tables in the L1 cache: [16] entries, indexed by a nibble, are one cache line,
which a warp's 32 different look-ups read in one go.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.nf4.blocks import Tiles, dequantize_tiles, quantize_tiles
from fastjax.kernels.nf4.reference import assemble, decode_absmax
from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES, NESTED_BLOCK_SIZE, SMALLEST_ABSMAX, decision_bounds
from fastjax.kernels.nf4.weight import QuantizedWeight

_HALF = BLOCK_SIZE // 2


def indexable(weight: QuantizedWeight) -> QuantizedWeight:
    """This weight; or its layer copied out of the stack, where a kernel could not index the stack.

    Pallas indexes arrays of more than 2^32 bytes with 64 bits and all others with 32 bits, which are signed.
    """
    num_bytes = weight.codes.size
    return weight.one_layer() if 2**31 <= num_bytes <= 2**32 else weight


def codes_operand(weight: QuantizedWeight) -> jax.Array:
    """uint8 [layers, bytes of one layer]; `layer_index` says which row is the weight."""
    return weight.codes.reshape(1 if weight.layer is None else len(weight.codes), -1)


def absmax_operands(weight: QuantizedWeight) -> tuple[jax.Array, ...]:
    """What a kernel needs to decode block scales with `load_absmax`: [layers, ...] each, then weight.layer, if any."""
    fields = (weight.absmax, weight.nested_scale, weight.nested_offset, weight.nested_table)
    layers = 1 if weight.layer is None else len(weight.codes)
    operands = tuple(field.reshape(layers, -1) for field in fields if field is not None)
    return operands if weight.layer is None else (*operands, weight.layer.reshape(1))


def layer_index(absmax_refs) -> jax.Array | int:
    """The row of the codes and of the block scales that is the weight; refs as from `absmax_operands`."""
    return 0 if len(absmax_refs) in (1, 4) else absmax_refs[-1][0]


def load_absmax(refs, block: jax.Array) -> jax.Array:
    """float32 scales of the blocks with these indices in one layer; refs as from `absmax_operands`."""
    layer = layer_index(refs)
    if len(refs) <= 2:
        return plgpu.load(refs[0].at[layer, block])
    absmax_ref, scale_ref, offset_ref, table_ref = refs[:4]
    value = plgpu.load(table_ref.at[layer, plgpu.load(absmax_ref.at[layer, block]).astype(jnp.int32)])
    return decode_absmax(value, plgpu.load(scale_ref.at[layer, block // NESTED_BLOCK_SIZE]), offset_ref[layer, 0])


def lookup(table_ref, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The table values of the two weights of each byte, the earlier one first."""
    codes = codes.astype(jnp.int32)
    return plgpu.load(table_ref.at[codes >> 4]), plgpu.load(table_ref.at[codes & 15])


def interleave(even: jax.Array, odd: jax.Array) -> jax.Array:
    """[..., n] and [..., n] to [..., 2n], in turn."""
    return jnp.stack([even, odd], axis=-1).reshape(*even.shape[:-1], 2 * even.shape[-1])


def _dequantize_kernel(codes_ref, table_ref, *refs, size: int, weight_dtype: jnp.dtype, tiles: Tiles):
    """Owns tiles.num_steps * tiles.num_blocks blocks: bytes [blocks, 32] in, [blocks, 64] out.

    Programs past the end do the last block again, and write what is there already. Only where the last block is
    partial are loads and stores masked.
    """
    *absmax_refs, out_ref = refs
    layer = layer_index(absmax_refs)
    last_block = (size - 1) // BLOCK_SIZE
    for step in range(tiles.num_steps):
        first = (pl.program_id(0) * tiles.num_steps + step) * tiles.num_blocks
        block = jnp.minimum(first + jnp.arange(tiles.num_blocks), last_block)
        byte = block[:, None] * _HALF + jnp.arange(_HALF)
        element = block[:, None] * BLOCK_SIZE + jnp.arange(BLOCK_SIZE)
        whole = size % BLOCK_SIZE == 0
        inside = None if whole else byte < (size + 1) // 2
        codes = plgpu.load(codes_ref.at[layer, byte], mask=inside, other=None if whole else 0)
        values = block_values(codes, table_ref, load_absmax(absmax_refs, block), weight_dtype).astype(out_ref.dtype)
        plgpu.store(out_ref.at[element], values, mask=None if whole else element < size)


def block_values(codes: jax.Array, table_ref, absmax: jax.Array, weight_dtype: jnp.dtype) -> jax.Array:
    """[..., blocks, 32] bytes and [..., blocks] scales to [..., blocks, 64] values, rounded to the weight's dtype."""
    high, low = (value * absmax[..., None] for value in lookup(table_ref, codes))
    return interleave(high.astype(weight_dtype), low.astype(weight_dtype))


@partial(jax.jit, static_argnames=("dtype", "tiles", "interpret"))
def dequantize_pallas(
    weight: QuantizedWeight, dtype: jnp.dtype, *, tiles: Tiles | None = None, interpret: bool = False
) -> jax.Array:
    """See `fastjax.kernels.nf4.dequantize`."""
    weight = indexable(weight)
    tiles = tiles or dequantize_tiles()
    size = weight.shape[0] * weight.shape[1]
    num_blocks = pl.cdiv(size, BLOCK_SIZE)
    return pl.pallas_call(
        partial(_dequantize_kernel, size=size, weight_dtype=weight.dtype, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((size,), dtype),
        grid=(pl.cdiv(num_blocks, tiles.num_blocks * tiles.num_steps),),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="nf4_dequantize",
    )(codes_operand(weight), jnp.asarray(CODES[weight.quant_type]), *absmax_operands(weight)).reshape(weight.shape)


def _joined_kernel(
    codes_ref,
    table_ref,
    *refs,
    shape: tuple[int, int],
    weight_dtype: jnp.dtype,
    first_row: int,
    tiles: Tiles,
    has_buffer: bool,
):
    """As `_dequantize_kernel`, into rows first_row... of a matrix that may have more columns than the weight."""
    *absmax_refs, out_ref = refs
    absmax_refs = absmax_refs[: len(absmax_refs) - has_buffer]
    blocks_per_row = shape[1] // BLOCK_SIZE
    last_block = shape[0] * blocks_per_row - 1
    block = jnp.minimum(pl.program_id(0) * tiles.num_blocks + jnp.arange(tiles.num_blocks), last_block)
    codes = plgpu.load(codes_ref.at[layer_index(absmax_refs), block[:, None] * _HALF + jnp.arange(_HALF)])
    row = block // blocks_per_row
    column = (block - row * blocks_per_row)[:, None] * BLOCK_SIZE + jnp.arange(BLOCK_SIZE)
    values = block_values(codes, table_ref, load_absmax(absmax_refs, block), weight_dtype).astype(out_ref.dtype)
    plgpu.store(out_ref.at[(first_row + row)[:, None], column], values)


def dequantize_joined(
    weights: Sequence[QuantizedWeight],
    dtype: jnp.dtype,
    *,
    extra_columns: int = 0,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The weights below one another in one buffer, [sum out, in + extra_columns]; the extra columns hold anything.

    All have the same `in`, a multiple of 64.
    """
    tiles = tiles or dequantize_tiles()
    num_rows = sum(weight.shape[0] for weight in weights)
    num_in = weights[0].shape[1]
    buffer: tuple[jax.Array, ...] = ()
    first_row = 0
    for weight in map(indexable, weights):
        assert weight.shape[1] == num_in and num_in % BLOCK_SIZE == 0
        operands = (codes_operand(weight), jnp.asarray(CODES[weight.quant_type]), *absmax_operands(weight), *buffer)
        kernel = partial(
            _joined_kernel,
            shape=weight.shape,
            weight_dtype=weight.dtype,
            first_row=first_row,
            tiles=tiles,
            has_buffer=bool(buffer),
        )
        num_blocks = weight.shape[0] * num_in // BLOCK_SIZE
        out = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((num_rows, num_in + extra_columns), dtype),
            grid=(pl.cdiv(num_blocks, tiles.num_blocks),),
            input_output_aliases={len(operands) - 1: 0} if buffer else {},
            compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
            interpret=interpret,
            name="nf4_dequantize_joined",
        )(*operands)
        buffer = (out,)
        first_row += weight.shape[0]
    return buffer[0]


def _exactly(operation: str, *args: jax.Array, interpret: bool) -> jax.Array:
    """ "rcp" or "div" in float32 rounded to nearest: Triton's own division is off by one in the last place at times."""
    if interpret:
        return 1.0 / args[0] if operation == "rcp" else args[0] / args[1]
    operands = ", ".join(f"${i}" for i in range(len(args) + 1))
    return plgpu.elementwise_inline_asm(
        f"{operation}.rn.f32 {operands};",
        args=args,
        constraints=",".join(["=f", *["f"] * len(args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )[0]


def _quantize_kernel(weight_ref, order_ref, codes_ref, absmax_ref, *, size: int, bounds, tiles: Tiles, interpret: bool):
    """Owns tiles.num_blocks blocks: the earlier and the later weight of each byte, [blocks, 32] each, as float32."""
    num_blocks = pl.cdiv(size, BLOCK_SIZE)
    block = jnp.minimum(pl.program_id(0) * tiles.num_blocks + jnp.arange(tiles.num_blocks), num_blocks - 1)
    byte = block[:, None] * _HALF + jnp.arange(_HALF)
    whole = size % BLOCK_SIZE == 0

    def load(element):
        inside = None if whole else element < size
        return plgpu.load(weight_ref.at[element], mask=inside, other=None if whole else 0.0).astype(jnp.float32)

    pair = (load(2 * byte), load(2 * byte + 1))
    absmax = jnp.max(jnp.maximum(jnp.abs(pair[0]), jnp.abs(pair[1])), axis=1)
    is_zero = absmax == 0.0
    divisor = jnp.where(is_zero, 1.0, absmax)
    reciprocal = _exactly("rcp", divisor, interpret=interpret)[:, None]
    codes = []
    for values in pair:
        scaled = values * reciprocal
        if not whole:
            # bitsandbytes multiplies whole blocks by the reciprocal and divides the partial one.
            quotient = _exactly("div", values, jnp.broadcast_to(divisor[:, None], values.shape), interpret=interpret)
            scaled = jnp.where((block == num_blocks - 1)[:, None], quotient, scaled)
        scaled = jnp.clip(scaled, -1.0, 1.0)
        index = sum((scaled > bound).astype(jnp.int32) for bound in bounds)
        codes.append(plgpu.load(order_ref.at[index]))
    packed = ((codes[0] << 4) | codes[1]).astype(jnp.uint8)
    plgpu.store(codes_ref.at[byte], packed, mask=None if whole else byte < (size + 1) // 2)
    if not whole:
        smallest = jnp.where(block == num_blocks - 1, jnp.float32(SMALLEST_ABSMAX), 0.0)
        absmax = jnp.where(is_zero, smallest, absmax)
    plgpu.store(absmax_ref.at[block], absmax)


@partial(jax.jit, static_argnames=("quant_type", "nested", "tiles", "interpret"))
def quantize_pallas(
    weight: jax.Array, *, quant_type: str, nested: bool, tiles: Tiles | None = None, interpret: bool = False
) -> QuantizedWeight:
    """See `fastjax.kernels.nf4.quantize`. The block scales, 1/64 of the weight, are coded by plain jnp."""
    tiles = tiles or quantize_tiles()
    num_blocks = pl.cdiv(weight.size, BLOCK_SIZE)
    bounds, order = decision_bounds(quant_type)
    packed, absmax = pl.pallas_call(
        partial(_quantize_kernel, size=weight.size, bounds=bounds, tiles=tiles, interpret=interpret),
        out_shape=(
            jax.ShapeDtypeStruct((pl.cdiv(weight.size, 2),), jnp.uint8),
            jax.ShapeDtypeStruct((num_blocks,), jnp.float32),
        ),
        grid=(pl.cdiv(num_blocks, tiles.num_blocks),),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="nf4_quantize",
    )(weight.reshape(-1), jnp.asarray(np.array(order, np.int32)))
    return assemble(packed, absmax, weight.shape, quant_type, nested, jnp.dtype(weight.dtype))

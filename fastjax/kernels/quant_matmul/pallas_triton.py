"""Products with a 4-bit weight as Pallas-Triton kernels that decode it on the way: y = x . W^T and dx = dy . W.

Few rows of bfloat16 have a kernel of their own (`pallas_triton_few_rows`). Here is the one for more rows, and for
float16 and float32. A word is four bytes of codes, eight weights that lie side by side along `in`. Word by word, W is
seen as eight planes [out, in/8]: plane i holds element i of every word. The sum over `in` is a sum over planes,

    y[m, n] = sum_i sum_q x[m, 8q + i] W[n, 8q + i]

so that no decoded value has to change its place in the registers; x is put into the same planes beforehand. The scaled
weights go to the tensor cores, which add in float32. Where `in` is split among programs, each writes its own float32
part, and the parts are added in order.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.nf4.pallas_triton import (
    absmax_operands,
    block_values,
    codes_operand,
    indexable,
    layer_index,
    load_absmax,
    lookup,
)
from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.blocks import FewRowsTiles, GradientTiles, Tiles, forward_tiles, gradient_tiles
from fastjax.kernels.quant_matmul.pallas_triton_few_rows import few_rows_product, words_operand

_WORDS = BLOCK_SIZE // 8


def _byte_permute(low, high, selector, interpret: bool) -> jax.Array:
    """PTX prmt: each nibble of `selector` picks a byte of (low, high); with its bit 3 set, that byte's sign, 8 times.

    Arguments are uint32 arrays or integers; the result is uint32.
    """
    shape = jnp.broadcast_shapes(*(np.shape(v) for v in (low, high, selector)))
    operands = [v if isinstance(v, int) else jnp.broadcast_to(v, shape) for v in (low, high, selector)]
    if interpret:
        low, high, selector = (jnp.uint32(v) if isinstance(v, int) else v for v in operands)
        sources = [(word >> (8 * i)) & 255 for word in (low, high) for i in range(4)]
        result = jnp.zeros(shape, jnp.uint32)
        for i in range(4):
            nibble = (selector >> (4 * i)) & 15
            byte = jnp.zeros(shape, jnp.uint32)
            for k, source in enumerate(sources):
                byte = jnp.where(nibble & 7 == k, source, byte)
            byte = jnp.where(nibble & 8 != 0, jnp.where(byte & 128 != 0, 255, 0).astype(jnp.uint32), byte)
            result = result | (byte << (8 * i))
        return result
    arrays = [v for v in operands if not isinstance(v, int)]
    names = iter(range(1, len(arrays) + 1))
    written = ", ".join(str(v) if isinstance(v, int) else f"${next(names)}" for v in operands)
    (result,) = plgpu.elementwise_inline_asm(
        f"prmt.b32 $0, {written};",
        args=arrays,
        constraints=",".join(["=r", *["r"] * len(arrays)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )
    return jax.lax.bitcast_convert_type(result, jnp.uint32)


def byte_tables(quant_type: str) -> np.ndarray:
    """uint32 [8]: of the 16 values as float32, the second bytes (4 words) and the top bytes (4 words).

    The two low bytes repeat the sign bit, which is what a permutation can make out of the top byte: a positive value
    ends in 0000, a negative one in ffff. Among the values of that form the nearest is taken, so that the error is that
    of bfloat16.
    """
    top = np.arange(65536, dtype=np.uint32)
    top = top[(top >> 7) & 255 != 255]
    values = ((top << 16) | np.where(top >> 15, 0xFFFF, 0).astype(np.uint32)).view(np.float32)
    nearest = np.array([top[np.argmin(np.abs(values - code))] if code else 0 for code in CODES[quant_type]], np.uint32)
    return np.concatenate([(nearest & 255).astype(np.uint8), (nearest >> 8).astype(np.uint8)]).view("<u4")


def _decode(words: jax.Array, table_ref, table, exact: bool, interpret: bool) -> list[jax.Array]:
    """The table values of a word's eight codes, in the order of the weight's elements, as float32.

    Each nibble is looked up with its three low bits in both halves of the table, byte by byte, and its fourth bit
    chooses the half. `exact` looks full float32 values up in memory.
    """
    if exact:
        pairs = [lookup(table_ref, (words >> (8 * byte)) & 255) for byte in range(4)]
        return [value for pair in pairs for value in pair]
    index, half = words & jnp.uint32(0x77777777), (words >> 1) & jnp.uint32(0x44444444)
    values: list[jax.Array] = []
    for _ in range(2):
        # A byte of the mask is ff where the nibble's fourth bit is 0.
        mask = _byte_permute(0xFF, 0, half, interpret)

        def chosen(t, index=index, mask=mask):
            first = _byte_permute(t[0], t[1], index, interpret)
            return (first & mask) | (_byte_permute(t[2], t[3], index, interpret) & ~mask)

        second, top = chosen(table[:4]), chosen(table[4:])
        # The high nibble of a byte is its earlier weight.
        for nibble in (1, 0, 3, 2):
            sign, source = 12 + nibble, 4 + nibble
            selector = source << 12 | nibble << 8 | sign << 4 | sign
            bits = _byte_permute(second, top, selector, interpret)
            values.append(jax.lax.bitcast_convert_type(bits, jnp.float32))
        index, half = index >> 16, half >> 16
    return values


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a . b^T in float32; float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _clamped(block: jax.Array, num_blocks: int, whole: bool) -> jax.Array:
    """The block indices, those past the end replaced by the last; `_masked_scale` makes them count nothing."""
    return block if whole else jnp.minimum(block, num_blocks - 1)


def _masked_scale(absmax_refs, row: jax.Array, block: jax.Array, num_blocks: int, whole: bool) -> jax.Array:
    scale = load_absmax(absmax_refs, row[:, None] * num_blocks + _clamped(block, num_blocks, whole))
    return scale if whole else jnp.where(block < num_blocks, scale, 0.0)


def _sorted_refs(refs, rank: int):
    """(absmax refs, (x . A, B) refs or (), output ref)."""
    *inputs, out_ref = refs
    return (inputs[:-2], inputs[-2:], out_ref) if rank else (inputs, (), out_ref)


def _load_table(table_ref, exact: bool):
    return None if exact else [table_ref[i] for i in range(8)]


def _matrix_kernel(
    x_ref, words_ref, table_ref, *refs, shape, num_rows: int, tiles: Tiles, rank: int, exact: bool, interpret: bool
):
    """Owns y[rows, out] for one part of `in`: accumulates y^T [out, rows] in float32 on the tensor cores.

    With an adapter, the first part adds (x . A) . B.
    """
    absmax_refs, adapter_refs, out_ref = _sorted_refs(refs, rank)
    num_out, num_in = shape
    num_blocks = num_in // BLOCK_SIZE
    column = pl.program_id(0) * tiles.out + jnp.arange(tiles.out)
    row = jnp.minimum(column, num_out - 1)
    x_row = pl.program_id(2) * tiles.rows + jnp.arange(tiles.rows)
    x_row_inside = jnp.minimum(x_row, num_rows - 1)[:, None]
    word = jnp.arange(_WORDS)
    layer = layer_index(absmax_refs)
    table = _load_table(table_ref, exact)
    num_steps = pl.cdiv(num_blocks, tiles.splits * tiles.blocks)
    whole = num_steps * tiles.splits * tiles.blocks == num_blocks
    part = pl.program_id(1)

    def step(i, total):
        first = (part * num_steps + i) * tiles.blocks
        block = first + jnp.arange(tiles.blocks)
        place = row[:, None] * num_blocks + _clamped(block, num_blocks, whole)
        words = plgpu.load(words_ref.at[layer, place[:, :, None] * _WORDS + word])
        values = _decode(words, table_ref, table, exact, interpret)
        scale = _masked_scale(absmax_refs, row, block, num_blocks, whole)[:, :, None]
        x_word = first * _WORDS + jnp.arange(tiles.blocks * _WORDS)
        x_word = x_word if whole else jnp.minimum(x_word, num_in // 8 - 1)
        for plane, value in enumerate(values):
            x = plgpu.load(x_ref.at[(x_row_inside * 8 + plane) * (num_in // 8) + x_word])
            weight = (value * scale).astype(x.dtype).reshape(tiles.out, tiles.blocks * _WORDS)
            total = total + _dot(weight, x)
        return total

    total = jax.lax.fori_loop(0, num_steps, step, jnp.zeros((tiles.out, tiles.rows), jnp.float32))
    if rank:
        index = jnp.arange(rank)
        xa = plgpu.load(adapter_refs[0].at[x_row_inside * rank + index])
        lora_b = plgpu.load(adapter_refs[1].at[row[:, None] * rank + index])
        total = total + jnp.where(part == 0, _dot(lora_b, xa), 0.0)
    inside = (x_row[None] < num_rows) & (column[:, None] < num_out)
    plgpu.store(out_ref.at[part, x_row[None], column[:, None]], total.astype(out_ref.dtype), mask=inside)


def quant_matmul_pallas(
    x: jax.Array,
    weight: QuantizedWeight,
    adapter: tuple[jax.Array, jax.Array] | None = None,
    *,
    tiles: Tiles | FewRowsTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [M, in] . W^T + xa . B^T, [M, out] in x's dtype. `in` is a multiple of 64. See `fastjax.kernels.quant_matmul`.

    adapter: (xa [M, R], B [out, R]) in x's dtype, or None.
    """
    if tiles is None:
        tiles = forward_tiles(len(x), weight.shape, x.dtype)
    if isinstance(tiles, FewRowsTiles):
        return few_rows_product(x, weight, adapter, tiles=tiles, interpret=interpret)
    return _more_rows_product(x, weight, adapter, tiles=tiles, interpret=interpret)


def _more_rows_product(x, weight: QuantizedWeight, adapter, *, tiles: Tiles, interpret: bool) -> jax.Array:
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    exact = x.dtype == jnp.float32
    table = CODES[weight.quant_type] if exact else byte_tables(weight.quant_type)
    rank = 0
    operands: tuple[jax.Array, ...] = ()
    if adapter is not None:
        # Triton's tiles are powers of two, and its tensor-core products have at least 16 terms.
        rank = max(16, pl.next_power_of_2(adapter[0].shape[1]))
        operands = tuple(jnp.pad(v, ((0, 0), (0, rank - v.shape[1]))).reshape(-1) for v in adapter)
    out_dtype = jnp.float32 if tiles.splits > 1 else x.dtype
    planes = x.reshape(num_rows, num_in // 8, 8).swapaxes(1, 2)
    parts = pl.pallas_call(
        partial(
            _matrix_kernel,
            shape=weight.shape,
            num_rows=num_rows,
            tiles=tiles,
            rank=rank,
            exact=exact,
            interpret=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((tiles.splits, num_rows, num_out), out_dtype),
        grid=(pl.cdiv(num_out, tiles.out), tiles.splits, pl.cdiv(num_rows, tiles.rows)),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="quant_matmul_matrix",
    )(planes.reshape(-1), words_operand(weight), jnp.asarray(table), *absmax_operands(weight), *operands)
    return parts[0] if tiles.splits == 1 else jnp.sum(parts, axis=0).astype(x.dtype)


def _gradient_kernel(
    dout_ref, codes_ref, table_ref, *refs, shape, weight_dtype: jnp.dtype, num_rows: int, tiles: GradientTiles
):
    """Owns dx[rows, blocks * 64 columns], float32; the sum runs over W's rows, tiles.out at a time."""
    *absmax_refs, dx_ref = refs
    layer = layer_index(absmax_refs)
    num_out, num_in = shape
    num_blocks = num_in // BLOCK_SIZE
    block = jnp.minimum(pl.program_id(0) * tiles.blocks + jnp.arange(tiles.blocks), num_blocks - 1)
    x_row = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows)
    x_row_inside = jnp.minimum(x_row, num_rows - 1)[:, None]

    def step(i, total):
        row = i * tiles.out + jnp.arange(tiles.out)
        inside = row < num_out
        row = jnp.minimum(row, num_out - 1)
        place = row[:, None, None] * num_blocks + block[None, :, None]
        codes = plgpu.load(codes_ref.at[layer, place * (BLOCK_SIZE // 2) + jnp.arange(BLOCK_SIZE // 2)])
        scale = load_absmax(absmax_refs, row[:, None] * num_blocks + block)
        dout = plgpu.load(dout_ref.at[x_row_inside * num_out + row], mask=inside[None] & (x_row_inside >= 0), other=0.0)
        weight = block_values(codes, table_ref, scale, weight_dtype).astype(dout.dtype)
        weight = weight.reshape(tiles.out, tiles.blocks * BLOCK_SIZE)
        precision = jax.lax.Precision.HIGHEST if dout.dtype == jnp.float32 else None
        return total + jnp.dot(dout, weight, precision=precision, preferred_element_type=jnp.float32)

    zeros = jnp.zeros((tiles.rows, tiles.blocks * BLOCK_SIZE), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(num_out, tiles.out), step, zeros)
    column = pl.program_id(0) * tiles.blocks * BLOCK_SIZE + jnp.arange(tiles.blocks * BLOCK_SIZE)
    inside = (x_row[:, None] < num_rows) & (column[None] < num_in)
    plgpu.store(dx_ref.at[x_row[:, None], column[None]], total.astype(dx_ref.dtype), mask=inside)


def quant_matmul_gradient_pallas(
    dout: jax.Array, weight: QuantizedWeight, *, tiles: GradientTiles | None = None, interpret: bool = False
) -> jax.Array:
    """dout [M, out] . W, [M, in] in dout's dtype."""
    weight = indexable(weight)
    num_rows = dout.shape[0]
    num_in = weight.shape[1]
    tiles = tiles or gradient_tiles(num_rows)
    return pl.pallas_call(
        partial(_gradient_kernel, shape=weight.shape, weight_dtype=weight.dtype, num_rows=num_rows, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_in), dout.dtype),
        grid=(pl.cdiv(num_in, tiles.blocks * BLOCK_SIZE), pl.cdiv(num_rows, tiles.rows)),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="quant_matmul_gradient",
    )(dout.reshape(-1), codes_operand(weight), jnp.asarray(CODES[weight.quant_type]), *absmax_operands(weight))

"""y = x . W^T for few rows of bfloat16 x: bound by reading and decoding W, for the warp's own matrix instruction.

mma.sync.m16n8k16 multiplies A [16, 16] by B [16, 8] with the operands spread over a warp in a fixed way: lane 4g + t
holds of A rows g and g + 8, of B column g, both at the same four places of the sum, and of the float32 result rows g
and g + 8, columns 2t and 2t + 1. The order of the sum is free, so A is W, B is x^T, and lane 4g + t takes words 2t and
2t + 1 (16 weights side by side) of a block of 64. What it decodes is what the instruction wants: no value changes its
lane, x is read as it lies, and the block's scale multiplies the float32 sum over the block.

Every array of the kernel is flat, with four elements a thread (times `groups`, the number of 8 rows of x): element e
belongs to thread (e mod 4T) / 4, T threads being in a program. Triton gives the arrays this layout since all loads have
this shape and the widest are 16 bytes; the assembly depends on it, and the tests on a GPU would see another.

In a thread, element j = e mod 4 of a result is row g + 8 (j / 2), column 2t + j mod 2. Group e / 4T is 8 rows of x for
x and the result, and for W's words with two groups the rows g or g + 8.

Decoding: a byte, two weights, is looked up in shared memory, where each lane has a column of the table of its own, so
that no two lanes meet in a bank.
"""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.nf4.pallas_triton import absmax_operands, codes_operand, layer_index, load_absmax
from fastjax.kernels.nf4.reference import decode_absmax
from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES, NESTED_BLOCK_SIZE
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.blocks import FewRowsTiles
from fastjax.kernels.quant_matmul.pallas_triton_warp import (
    Asm,
    Lanes,
    adapter_product,
    asm_call,
    make_lanes,
    product,
    product_interpreted,
)

_WORDS = BLOCK_SIZE // 8
_ROWS = 16
_COLUMNS = 8


def _fill_tables(table_ref, nested_table: jax.Array | None, tiles: FewRowsTiles) -> jax.Array:
    """Writes the tables to shared memory; 4 * lane, int32, which all readers take so that they come later.

    nested_table: of the block scales, [256] repeated, or None.
    """
    size = 128 * tiles.num_warps * tiles.groups
    threads, pack = 32 * tiles.num_warps, 4 * tiles.groups
    declared = []
    asm = Asm()
    thread = asm.emit("mov.u32", "%tid.x")
    values = []
    if nested_table is not None:
        declared.append(".shared .align 16 .b8 nf4_nested[1024];")
        values.append(nested_table)
        place = asm.emit("mad.lo.u32", asm.emit("and.b32", thread, "63"), "16", asm.emit("mov.u32", "nf4_nested"))
        asm.lines.append(f"st.shared.v4.b32 [{place}], {{{', '.join(f'${pack + k}' for k in range(4))}}};")
    declared.append(".shared .align 16 .b8 nf4_pairs[32768];")
    e = jnp.arange(size)
    order = (jax.lax.div(e, 4 * threads) * 4 + jax.lax.rem(e, 4)) * threads + jax.lax.rem(jax.lax.div(e, 4), threads)
    place = asm.emit("mad.lo.u32", thread, "16", asm.emit("mov.u32", "nf4_pairs"))
    # Eight stores of 16 bytes an entry.
    for array in range(2048 // size):
        values.append(plgpu.load(table_ref.at[jax.lax.div(order + array * size, 8)]))
        for k in range(pack):
            v = f"${len(values) * pack + k}"
            stored = f"[{place}+{16 * (array * size + k * threads)}], {{{v}, {v}, {v}, {v}}}"
            asm.lines.append(f"st.shared.v4.b32 {stored};")
    asm.lines.append("bar.sync 0;")
    offset = asm.emit("shl.b32", asm.emit("and.b32", thread, "31"), "2")
    asm.lines += [f"mov.u32 ${k}, {offset};" for k in range(pack)]
    kinds = ["=r", *("f" if v.dtype == jnp.float32 else "r" for v in values)]
    constraints = ",".join(kind for kind in kinds for _ in range(pack))
    return asm_call("\n".join([*declared, asm.text()]), constraints, values, pack, jnp.int32)


def _nested_value(code: jax.Array, offset: jax.Array) -> jax.Array:
    """The nested table's float32 values of int32 codes, from shared memory."""
    text = """{
.reg .b32 place;
mov.u32 place, nf4_nested;
mad.lo.u32 place, $1, 4, place;
ld.shared.f32 $0, [place];
}"""
    return asm_call(text, "=f,r,r", [code, offset], 1, jnp.float32)


def _load_scales(absmax_refs, block, words) -> tuple[jax.Array, ...]:
    """What `_scales` needs of these blocks; words: where uint32 absmax has four codes of each row, None otherwise."""
    if words is None:
        return (load_absmax(absmax_refs, block),)
    layer = layer_index(absmax_refs)
    codes = plgpu.load(absmax_refs[0].at[layer, words])
    return codes, plgpu.load(absmax_refs[1].at[layer, block // NESTED_BLOCK_SIZE])


def _scales(absmax_refs, loaded, lanes: Lanes, table_offset: Callable, interpret: bool) -> jax.Array:
    """float32 scales, the lane's own one of four codes."""
    if len(loaded) == 1:
        return loaded[0]
    layer = layer_index(absmax_refs)
    code = (loaded[0] >> (8 * lanes.t).astype(jnp.uint32)).astype(jnp.int32) & 255
    value = plgpu.load(absmax_refs[3].at[layer, code]) if interpret else _nested_value(code, table_offset())
    return decode_absmax(value, loaded[1], absmax_refs[2][layer, 0])


def _kernel(x_ref, words_ref, table_ref, *refs, shape, num_rows: int, tiles: FewRowsTiles, rank: int, interpret: bool):
    """Owns y[8 * groups rows of x, 16 * row_tiles rows of W] in float32: the warps share `in` and add up at the end."""
    *inputs, out_ref = refs
    absmax_refs, adapter_refs = (inputs[:-2], inputs[-2:]) if rank else (inputs, [])
    groups, num_warps, row_tiles = tiles.groups, tiles.num_warps, tiles.row_tiles
    num_out, num_in = shape
    num_blocks = num_in // BLOCK_SIZE
    blocks_per_warp = pl.cdiv(num_blocks, num_warps * 2) * 2
    whole = blocks_per_warp * num_warps == num_blocks
    layer = layer_index(absmax_refs)
    lanes = make_lanes(num_warps, groups)
    four_codes = absmax_refs[0].dtype == jnp.uint32

    @cache
    def table_offset():
        if interpret:
            return lanes.t
        e = jnp.arange(128 * num_warps * groups)
        nested = plgpu.load(absmax_refs[3].at[layer, jax.lax.rem(e, 256)]) if four_codes else None
        return _fill_tables(table_ref, nested, tiles)

    x_row = (pl.program_id(1) * groups + lanes.group) * _COLUMNS + lanes.g
    x_row = x_row if num_rows % (_COLUMNS * groups) == 0 else jnp.minimum(x_row, num_rows - 1)
    first_row = pl.program_id(0) * _ROWS * row_tiles
    begin = lanes.warp * blocks_per_warp
    is_flat = len(words_ref.shape) == 1

    def weight_row(tile, half):
        row = first_row + _ROWS * tile + lanes.g + 8 * half
        return row if num_out % (_ROWS * row_tiles) == 0 else jnp.minimum(row, num_out - 1)

    def inside(block):
        return block if whole else jnp.minimum(block, num_blocks - 1)

    # What does not change from load to load, so that an address costs one addition.
    word_bases = []
    for tile in range(row_tiles):
        for half in range(2) if groups == 1 else (lanes.group,):
            base = weight_row(tile, half) * (num_blocks * _WORDS) + 4 * jax.lax.rem(lanes.t, 2) + lanes.j
            word_bases.append(base + layer * (num_out * num_blocks * _WORDS) if is_flat else base)
    # After the exchange between lanes, lane t has the words from 4 (t mod 2) + 2 (t / 2) on.
    x_base = x_row * (num_in // 2) + 16 * jax.lax.rem(lanes.t, 2) + 8 * jax.lax.div(lanes.t, 2) + lanes.j
    scale_rows = []
    for tile in range(0, row_tiles, groups):
        rows = (weight_row(tile, lanes.half), weight_row(tile + lanes.half, lanes.group))
        scale_rows.append(rows[groups - 1])
    multiply = product_interpreted if interpret else product

    def load_words(pair):
        block = inside(begin + pair + jax.lax.div(lanes.t, 2)) * _WORDS
        return [plgpu.load(words_ref.at[b + block] if is_flat else words_ref.at[layer, b + block]) for b in word_bases]

    def load_x(pair):
        places = [x_base + inside(begin + pair + i) * (BLOCK_SIZE // 2) for i in range(2)]
        return [plgpu.load(x_ref.at[place + 4 * side]) for place in places for side in range(2)]

    def load(start, num: int):
        """The words and scales of `num` <= 8 blocks from place `start` of each warp's part on."""
        words = [load_words(start + pair) for pair in range(0, num, 2)]
        block = begin + 4 * lanes.side + lanes.t + start
        block_inside = block if whole and num == 8 else jnp.minimum(block, num_blocks - 1)
        scales = []
        for row in scale_rows:
            place = None
            if four_codes:
                place = jax.lax.div(row * num_blocks + begin + start, 4)
                place = place + (lanes.side if num > 4 else 0)
                place = place if whole else jnp.minimum(place, num_out * num_blocks // 4 - 1)
            scales.append(_load_scales(absmax_refs, row * num_blocks + block_inside, place))
        return words, scales

    def add(loaded, start, totals, num: int):
        """Adds the products of these blocks."""
        words, scales = loaded
        xs = load_x(start)
        scales = [_scales(absmax_refs, scale, lanes, table_offset, interpret) for scale in scales]
        if not whole:
            block = begin + 4 * lanes.side + lanes.t + start
            scales = [jnp.where(block < num_blocks, scale, 0.0) for scale in scales]
        for i, pair in enumerate(range(0, num, 2)):
            xs_ahead = load_x(start + pair + 2) if pair + 2 < num else xs
            for tile in range(row_tiles):
                per_tile = words[i][2 * tile : 2 * tile + 2] if groups == 1 else words[i][tile : tile + 1]
                arguments = (totals[tile], per_tile, scales[tile // groups], table_offset(), xs, table_ref)
                total = multiply(*arguments, tiles, tile % groups, pair)
                totals = (*totals[:tile], total, *totals[tile + 1 :])
            xs = xs_ahead
        return totals

    totals = tuple(jnp.zeros((128 * num_warps * groups,), jnp.float32) for _ in range(row_tiles))
    # The loads of a step are issued before the step ahead of it is worked on.
    num_steps, rest = divmod(blocks_per_warp, tiles.blocks)
    sizes = [tiles.blocks] * num_steps + [rest] * (rest > 0)
    loaded = load(0, sizes[0])
    table_offset()
    done = 0
    if num_steps > 2:

        def body(i, carry):
            loaded, totals = carry
            ahead = load((i + 1) * tiles.blocks, tiles.blocks)
            return ahead, add(loaded, i * tiles.blocks, totals, tiles.blocks)

        done = num_steps - 1
        loaded, totals = jax.lax.fori_loop(0, done, body, (loaded, totals))
    for i in range(done, len(sizes)):
        ahead = load((i + 1) * tiles.blocks, sizes[i + 1]) if i + 1 < len(sizes) else None
        totals = add(loaded, i * tiles.blocks, totals, sizes[i])
        loaded = ahead
    y_lanes = make_lanes(1, groups)
    y_row = (pl.program_id(1) * groups + y_lanes.group) * _COLUMNS + 2 * y_lanes.t + y_lanes.side
    for tile, total in enumerate(totals):
        for first in range(0, rank, 16 * groups):
            column = first // 2 + lanes.t + 4 * lanes.side
            place = weight_row(tile, lanes.half) * (rank // 2) + column + 8 * lanes.group
            lora_b = jnp.where(lanes.warp == 0, plgpu.load(adapter_refs[1].at[place]), 0)
            xa = [plgpu.load(adapter_refs[0].at[x_row * (rank // 2) + column + 8 * i]) for i in range(groups)]
            total = adapter_product(total, lora_b, xa, tiles, interpret)
        y = jnp.sum(total.reshape(groups, num_warps, 128), axis=1).reshape(128 * groups)
        row = first_row + _ROWS * tile + y_lanes.g + 8 * y_lanes.half
        plgpu.store(out_ref.at[y_row, row], y.astype(out_ref.dtype), mask=(y_row < num_rows) & (row < num_out))


def words_operand(weight: QuantizedWeight) -> jax.Array:
    """The codes as uint32 [layers, words of one layer]: the same bytes."""
    codes = codes_operand(weight)
    return jax.lax.bitcast_convert_type(codes.reshape(len(codes), -1, 4), jnp.uint32)


def _pairs_of(x: jax.Array) -> jax.Array:
    """uint32 [size / 2] of a bfloat16 array: the same bytes."""
    return jax.lax.bitcast_convert_type(x.reshape(-1, 2), jnp.uint32)


def _scale_operands(weight: QuantizedWeight, num_blocks: int, num_warps: int) -> tuple[jax.Array, ...]:
    """As `absmax_operands`; nested codes are uint32, four at once, where each warp's part begins on such a word."""
    codes, *others = absmax_operands(weight)
    if weight.nested and num_blocks % 4 == 0 and pl.cdiv(num_blocks, num_warps * 2) * 2 % 4 == 0:
        codes = jax.lax.bitcast_convert_type(codes.reshape(len(codes), -1, 4), jnp.uint32)
    return (codes, *others)


def pair_table(quant_type: str) -> np.ndarray:
    """uint32 [256]: the two weights of a byte as bfloat16, the earlier one in the lower half."""
    bits = CODES[quant_type].astype(jnp.bfloat16).view(np.uint16).astype(np.uint32)
    byte = np.arange(256)
    return bits[byte >> 4] | bits[byte & 15] << 16


def few_rows_product(
    x: jax.Array,
    weight: QuantizedWeight,
    adapter: tuple[jax.Array, jax.Array] | None = None,
    *,
    tiles: FewRowsTiles,
    interpret: bool = False,
) -> jax.Array:
    """As `quant_matmul_pallas`, for bfloat16 x."""
    num_rows = x.shape[0]
    num_out, num_in = weight.shape
    words = words_operand(weight)
    rank = 0
    operands: tuple[jax.Array, ...] = ()
    if adapter is not None:
        rank = pl.cdiv(adapter[0].shape[1], 16 * tiles.groups) * 16 * tiles.groups
        operands = tuple(_pairs_of(jnp.pad(v, ((0, 0), (0, rank - v.shape[1])))) for v in adapter)
    return pl.pallas_call(
        partial(
            _kernel,
            shape=weight.shape,
            num_rows=num_rows,
            tiles=tiles,
            rank=rank,
            interpret=interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_out), x.dtype),
        grid=(pl.cdiv(num_out, _ROWS * tiles.row_tiles), pl.cdiv(num_rows, _COLUMNS * tiles.groups)),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="quant_matmul_few_rows",
    )(
        _pairs_of(x),
        # Flat, for cheaper addresses, where 32 bits index it.
        words if weight.codes.size > 2**32 else words.reshape(-1),
        jnp.asarray(pair_table(weight.quant_type)),
        *_scale_operands(weight, num_in // BLOCK_SIZE, tiles.num_warps),
        *operands,
    )

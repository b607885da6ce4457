"""y = x . W^T for few rows of bfloat16 x: bound by reading and decoding W, for the warp's own matrix instruction.

mma.sync.m16n8k16 multiplies A [16, 16] by B [16, 8] with the operands spread over a warp in a fixed way: lane 4g + t
holds of A rows g and g + 8, of B column g, both at the same four places of the sum, and of the float32 result rows g
and g + 8, columns 2t and 2t + 1. The order of the sum is free, so A is W and B is x^T, and what a lane decodes is what
the instruction wants from it: x is read as it lies, and the block's scale multiplies the float32 sum over the block.

A lane reads 16 bytes at once, so that the four lanes of a row read two blocks of 64, two lanes each. With up to 4 rows
of x that is well: columns 0-3 of B are x over the first block, columns 4-7 over the second, and 0 in the lanes of the
other block. Otherwise lanes exchange half of their words first, and each has two words of either block.

Every array of the kernel is flat, with four elements a thread: element e belongs to thread e / 4. Triton gives the
arrays this layout since all loads have this shape and the widest are 16 bytes; the assembly depends on it, and the
tests on a GPU would see another. Element j = e mod 4 of a thread's result is row g + 8 (j / 2), column 2t + j mod 2.

Decoding: a byte, two weights, is looked up in shared memory, where each lane has a column of the table of its own, so
that no two lanes meet in a bank. One byte permutation makes the address, since 256 bytes of the table hold the entries
i and 128 + i: the lane's column and the byte's high bit below, its other seven bits above.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.nf4.pallas_triton import absmax_operands, codes_operand, layer_index, load_absmax
from fastjax.kernels.nf4.tables import BLOCK_SIZE, CODES, NESTED_BLOCK_SIZE
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.blocks import FewRowsTiles
from fastjax.kernels.quant_matmul.pallas_triton_warp import (
    Asm,
    add_scaled,
    argument,
    asm_call,
    decode,
    exchange,
    fold,
    low_and_high,
    make_lanes,
    multiply,
)

_WORDS = BLOCK_SIZE // 8
_ROWS = 16
# Blocks of `in` that a warp takes a step: one uint32 holds their codes of nested scales.
_STEP = 4


def _fill_tables(table_ref, nested_table: jax.Array | None, num_warps: int) -> jax.Array:
    """Writes the tables to shared memory; uint32 with 4 * lane in each byte, which all readers take to come later.

    nested_table: of the block scales, [256] repeated, or None.
    """
    size, threads = 128 * num_warps, 32 * num_warps
    declared = [".shared .align 16 .b8 nf4_pairs[32768];"]
    asm = Asm()
    thread = asm.emit("mov.u32", "%tid.x")
    values = []
    if nested_table is not None:
        declared.append(".shared .align 16 .b8 nf4_nested[1024];")
        values.append(nested_table)
        place = asm.emit("mad.lo.u32", asm.emit("and.b32", thread, "63"), "16", asm.emit("mov.u32", "nf4_nested"))
        asm.lines.append(f"st.shared.v4.b32 [{place}], {{{', '.join(argument(1, k) for k in range(4))}}};")
    e = jnp.arange(size)
    order = jax.lax.rem(e, 4) * threads + jax.lax.div(e, 4)
    place = asm.emit("mad.lo.u32", thread, "16", asm.emit("mov.u32", "nf4_pairs"))
    # Eight stores of 16 bytes an entry; 256 bytes hold two entries, i and 128 + i.
    for array in range(2048 // size):
        chunk = order + array * size
        entry = jax.lax.div(chunk, 16) + 128 * jax.lax.rem(jax.lax.div(chunk, 8), 2)
        values.append(plgpu.load(table_ref.at[entry]))
        for k in range(4):
            v = argument(len(values), k)
            stored = f"[{place}+{16 * (array * size + k * threads)}], {{{v}, {v}, {v}, {v}}}"
            asm.lines.append(f"st.shared.v4.b32 {stored};")
    asm.lines.append("bar.sync 0;")
    asm.give([asm.emit("mul.lo.u32", asm.emit("and.b32", thread, "31"), "0x04040404")] * 4)
    return asm_call("\n".join([*declared, asm.text()]), values, jnp.uint32)


def _nested_scale(code, scale, offset, lane_bytes) -> jax.Array:
    """table[code] * scale + offset, the nested table being in shared memory."""
    asm = Asm()
    table = asm.emit("mov.u32", "nf4_nested")
    values = []
    for k in range(4):
        place = asm.emit("mad.lo.u32", argument(1, k), "4", table)
        value = asm.emit("ld.shared.f32", f"[{place}]", kind="f32")
        values.append(asm.emit("fma.rn.f32", value, argument(2, k), argument(3, k), kind="f32"))
    asm.give(values, "f32")
    return asm_call(asm.text(), [code, scale, jnp.full_like(scale, offset), lane_bytes], jnp.float32)


def _kernel(x_ref, words_ref, table_ref, *refs, shape, num_rows: int, tiles: FewRowsTiles, rank: int, interpret: bool):
    """Owns y[tiles.columns rows of x, 16 * row_tiles * row_warps rows of W] in float32: warps that share `in` add up at
    the end. A step is four blocks; what the next one needs of W is loaded while this one is worked on.
    """
    *inputs, out_ref = refs
    absmax_refs, adapter_refs = (inputs[:-2], inputs[-2:]) if rank else (inputs, [])
    row_tiles, num_warps = tiles.row_tiles, tiles.num_warps
    # x is loaded, and scales are applied, by the unit: a pair of blocks side by side in the columns, or one block.
    paired = tiles.columns == 4
    groups = pl.cdiv(tiles.columns, 8)
    num_units, num_words = (2, 4) if paired else (4, 2)
    num_out, num_in = shape
    num_blocks = num_in // BLOCK_SIZE
    num_steps = pl.cdiv(num_blocks, _STEP * tiles.in_warps)
    whole = num_steps * tiles.in_warps * _STEP == num_blocks
    layer = layer_index(absmax_refs)
    lanes = make_lanes(num_warps)
    four_codes = absmax_refs[0].dtype == jnp.uint32
    is_flat = len(words_ref.shape) == 1
    first_x_row = pl.program_id(1) * tiles.columns
    rows_per_warp = _ROWS * row_tiles
    row_warp = pl.program_id(0) * tiles.row_warps + jax.lax.div(lanes.warp, tiles.in_warps)
    share = jax.lax.rem(lanes.warp, tiles.in_warps)

    def weight_row(tile, half):
        row = row_warp * rows_per_warp + _ROWS * tile + lanes.g + 8 * half
        return row if num_out % (rows_per_warp * tiles.row_warps) == 0 else jnp.minimum(row, num_out - 1)

    def block_of(step):
        return (step * tiles.in_warps + share) * _STEP

    def inside(block):
        return block if whole else jnp.minimum(block, num_blocks - 1)

    # What does not change from load to load, so that an address costs one addition.
    word_bases = []
    for tile in range(row_tiles):
        for half in range(2):
            base = weight_row(tile, half) * (num_blocks * _WORDS) + 4 * jax.lax.rem(lanes.t, 2) + lanes.j
            word_bases.append(base + layer * (num_out * num_blocks * _WORDS) if is_flat else base)
    if paired:
        x_word, x_step = 4 * lanes.t, 4
        x_rows = [first_x_row + jax.lax.rem(lanes.g, 4)]
        x_mask = jax.lax.div(lanes.g, 4) == jax.lax.div(lanes.t, 2)
    else:
        x_word, x_step = 4 * jax.lax.rem(lanes.t, 2) + jax.lax.div(lanes.t, 2), 8
        x_rows = [first_x_row + group * 8 + lanes.g for group in range(groups)]
        x_mask = None
    x_masks = [x_mask if num_rows % tiles.columns == 0 else _both(x_mask, row < num_rows) for row in x_rows]
    if paired:
        # Element (half, side) is of block 2 * side + t / 2 of a step.
        scale_rows = [weight_row(tile, lanes.half) for tile in range(row_tiles)]
        scale_block = 2 * lanes.side + jax.lax.div(lanes.t, 2)
    else:
        # Element (half, side) is of tile 2i + side, block t of a step.
        of_side = lanes.side if row_tiles > 1 else 0
        scale_rows = [weight_row(tile + of_side, lanes.half) for tile in range(0, row_tiles, 2)]
        scale_block = lanes.t
    offset = absmax_refs[2][layer, 0] if four_codes else None

    def load_words(step, pair):
        block = inside(block_of(step) + 2 * pair + jax.lax.div(lanes.t, 2)) * _WORDS
        return [plgpu.load(words_ref.at[b + block] if is_flat else words_ref.at[layer, b + block]) for b in word_bases]

    def load_x(step, unit):
        block = block_of(step + unit // num_units) + unit % num_units * (_STEP // num_units)
        block = inside(block + jax.lax.div(lanes.t, 2)) - jax.lax.div(lanes.t, 2) if paired else inside(block)
        place = block * (BLOCK_SIZE // 2) + 4 * x_word + lanes.j
        loaded = []
        for row, mask in zip(x_rows, x_masks, strict=True):
            at = [x_ref.at[row * (num_in // 2) + place + x_step * word] for word in range(num_words)]
            loaded.append([plgpu.load(ref, mask=mask, other=None if mask is None else jnp.uint32(0)) for ref in at])
        return loaded

    def load_scales(step):
        if not four_codes:
            block = inside(block_of(step) + scale_block)
            return [(load_absmax(absmax_refs, row * num_blocks + block),) for row in scale_rows]
        loaded = []
        for row in scale_rows:
            block = row * num_blocks + (block_of(step) if whole else jnp.minimum(block_of(step), num_blocks - _STEP))
            codes = plgpu.load(absmax_refs[0].at[layer, jax.lax.div(block, _STEP)])
            loaded.append((codes, plgpu.load(absmax_refs[1].at[layer, jax.lax.div(block, NESTED_BLOCK_SIZE)])))
        return loaded

    def scales_of(loaded, step):
        scales = []
        for each in loaded:
            scale = each[0]
            if four_codes:
                code = (each[0] >> (8 * scale_block).astype(jnp.uint32)).astype(jnp.int32) & 255
                if interpret:
                    scale = plgpu.load(absmax_refs[3].at[layer, code]) * each[1] + offset
                else:
                    scale = _nested_scale(code, each[1], offset, lane_bytes)
            scales.append(scale if whole else jnp.where(block_of(step) + scale_block < num_blocks, scale, 0.0))
        return scales

    def operands(words, tile: int) -> list:
        """For each unit of a pair of blocks: `decode`'s halves and the places of each word."""
        first, second = words[2 * tile : 2 * tile + 2]
        if paired:
            halves = [low_and_high(rows, lane_bytes) for rows in (first, second)]
            return [(halves, [(word, word) for word in range(4)])]
        blocks = [low_and_high(block, lane_bytes) for block in exchange(first, second, interpret)]
        return [([block] * 2, [(word, 2 + word) for word in range(2)]) for block in blocks]

    def work(step, loaded, totals, ahead: bool):
        """Adds a step's products; on the way, loads what the next step needs, and the x of the next unit."""
        words, scales, x = loaded
        scales = scales_of(scales, step)
        next_scales = load_scales(step + 1) if ahead else None
        next_words = []
        for pair in range(_STEP // 2):
            next_words.append(load_words(step + 1, pair) if ahead else None)
            by_tile = [operands(words[pair], tile) for tile in range(row_tiles)]
            for i in range(num_units // 2):
                unit = pair * (num_units // 2) + i
                next_x = load_x(step, unit + 1) if ahead or unit + 1 < num_units else None
                for tile in range(row_tiles):
                    halves, places = by_tile[tile][i]
                    parts = [jnp.zeros_like(total) for total in totals[tile]]
                    for word, place in enumerate(places):
                        for half_word in range(2):
                            weights = decode(halves, place, table_ref, half_word, interpret)
                            for group, of_group in enumerate(x):
                                parts[group] = multiply(parts[group], weights, of_group[word], half_word, interpret)
                    scale, side, lane = (scales[tile], unit, None) if paired else (scales[tile // 2], tile % 2, unit)
                    sums = []
                    for total, part in zip(totals[tile], parts, strict=True):
                        sums.append(add_scaled(total, part, scale, side, lane, interpret))
                    totals = [*totals[:tile], sums, *totals[tile + 1 :]]
                x = next_x
        return (next_words, next_scales, x), totals

    loaded = [load_words(0, pair) for pair in range(_STEP // 2)], load_scales(0), load_x(0, 0)
    lane_bytes = jnp.zeros((128 * num_warps,), jnp.uint32)
    if not interpret:
        e = jnp.arange(128 * num_warps)
        nested = plgpu.load(absmax_refs[3].at[layer, jax.lax.rem(e, 256)]) if four_codes else None
        lane_bytes = _fill_tables(table_ref, nested, num_warps)
    totals = [[jnp.zeros((128 * num_warps,), jnp.float32)] * groups for _ in range(row_tiles)]
    done = 0
    if num_steps > 3:
        done = num_steps - 1
        body = lambda step, carry: work(step, carry[0], carry[1], True)  # noqa: E731
        loaded, totals = jax.lax.fori_loop(0, done, body, (loaded, totals))
    for step in range(done, num_steps):
        loaded, totals = work(step, loaded, totals, step + 1 < num_steps)
    if paired:
        totals = [[fold(total, interpret) for total in of_tile] for of_tile in totals]
    for first in range(0, rank, 16):
        for tile in range(row_tiles):
            column = first // 2 + lanes.t + 4 * lanes.half
            lora_b = plgpu.load(adapter_refs[1].at[weight_row(tile, lanes.side) * (rank // 2) + column])
            lora_b = jnp.where(share == 0, lora_b, 0)
            for group, row in enumerate(x_rows):
                row = first_x_row + lanes.g if paired else row
                place = jnp.minimum(row, num_rows - 1) * (rank // 2) + first // 2 + lanes.t + 4 * lanes.side
                totals[tile][group] = multiply(
                    totals[tile][group], lora_b, plgpu.load(adapter_refs[0].at[place]), 0, interpret
                )
    y_lanes = make_lanes(tiles.row_warps)
    for tile in range(row_tiles):
        row = (pl.program_id(0) * tiles.row_warps + y_lanes.warp) * rows_per_warp + _ROWS * tile
        row = row + y_lanes.g + 8 * y_lanes.half
        for group in range(groups):
            column = group * 8 + 2 * y_lanes.t + y_lanes.side
            y_row = first_x_row + column
            y = jnp.sum(totals[tile][group].reshape(tiles.row_warps, tiles.in_warps, 128), axis=1).reshape(-1)
            mask = (y_row < num_rows) & (row < num_out) & (column < tiles.columns)
            plgpu.store(out_ref.at[y_row, row], y.astype(out_ref.dtype), mask=mask)


def _both(mask: jax.Array | None, other: jax.Array) -> jax.Array:
    return other if mask is None else mask & other


def words_operand(weight: QuantizedWeight) -> jax.Array:
    """The codes as uint32 [layers, words of one layer]: the same bytes."""
    codes = codes_operand(weight)
    return jax.lax.bitcast_convert_type(codes.reshape(len(codes), -1, 4), jnp.uint32)


def _pairs_of(x: jax.Array) -> jax.Array:
    """uint32 [size / 2] of a bfloat16 array: the same bytes."""
    return jax.lax.bitcast_convert_type(x.reshape(-1, 2), jnp.uint32)


def _scale_operands(weight: QuantizedWeight, num_blocks: int) -> tuple[jax.Array, ...]:
    """As `absmax_operands`; nested codes are uint32, a step's four at once, where rows begin on such a word."""
    codes, *others = absmax_operands(weight)
    if weight.nested and num_blocks % _STEP == 0:
        codes = jax.lax.bitcast_convert_type(codes.reshape(len(codes), -1, _STEP), jnp.uint32)
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
        rank = pl.cdiv(adapter[0].shape[1], 16) * 16
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
        grid=(pl.cdiv(num_out, _ROWS * tiles.row_tiles * tiles.row_warps), pl.cdiv(num_rows, tiles.columns)),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="quant_matmul_few_rows",
    )(
        _pairs_of(x),
        # Flat, for cheaper addresses, where 32 bits index it.
        words if weight.codes.size > 2**32 else words.reshape(-1),
        jnp.asarray(pair_table(weight.quant_type)),
        *_scale_operands(weight, num_in // BLOCK_SIZE),
        *operands,
    )

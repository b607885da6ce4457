"""One warp's share of the product for few rows: lanes, PTX, and what its instructions do, for the interpreter.

The layout of elements over threads is that of `pallas_triton_few_rows`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.quant_matmul.blocks import FewRowsTiles

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


class Lanes(NamedTuple):
    """Where each element of a flat array belongs, int32 arrays: see the module's docstring."""

    group: jax.Array
    warp: jax.Array
    g: jax.Array
    t: jax.Array
    half: jax.Array
    side: jax.Array
    j: jax.Array


def make_lanes(num_warps: int, groups: int) -> Lanes:
    # Quotients and remainders of a range, which Triton's analysis of contiguous addresses understands.
    e = jnp.arange(128 * num_warps * groups)
    return Lanes(
        group=jax.lax.div(e, 128 * num_warps),
        warp=jax.lax.rem(jax.lax.div(e, 128), num_warps),
        g=jax.lax.rem(jax.lax.div(e, 16), 8),
        t=jax.lax.rem(jax.lax.div(e, 4), 4),
        half=jax.lax.rem(jax.lax.div(e, 2), 2),
        side=jax.lax.rem(e, 2),
        j=jax.lax.rem(e, 4),
    )


class Asm:
    """PTX of one thread, line by line."""

    def __init__(self):
        self.lines: list[str] = []
        self.num_registers = {"b32": 0, "f32": 0}

    def new(self, kind: str = "b32") -> str:
        self.num_registers[kind] += 1
        return f"{kind[0]}{self.num_registers[kind] - 1}"

    def emit(self, operation: str, *sources: str, kind: str = "b32") -> str:
        """Appends an instruction; the new register that it writes."""
        result = self.new(kind)
        self.lines.append(f"{operation} {result}, {', '.join(sources)};")
        return result

    def mma(self, a: list[str], b: list[str], c: list[str]) -> list[str]:
        """The four registers of a . b + c."""
        result = [self.new("f32") for _ in range(4)]
        groups = ", ".join("{" + ", ".join(registers) + "}" for registers in (result, a, b, c))
        self.lines.append(f"{_MMA} {groups};")
        return result

    def text(self) -> str:
        declared = [f".reg .{kind} {kind[0]}<{num}>;" for kind, num in self.num_registers.items() if num]
        return "\n".join(["{", *declared, *self.lines, "}"])


def _decode(asm: Asm, word: str, lane_offset: str) -> list[str]:
    """The word's eight weights as bfloat16 pairs, from this lane's column of the table in shared memory."""
    pairs = []
    for shift in ("shl.b32 7", "shr.u32 1", "shr.u32 9", "shr.u32 17"):
        operation, places = shift.split()
        shifted = asm.emit(operation, word, places)
        # (shifted & mask) | offset
        place = asm.emit("lop3.b32", shifted, "0x7f80", lane_offset, "0xea")
        pairs.append(asm.emit("ld.shared.b32", f"[{asm.emit('add.u32', place, 'pairs')}]"))
    return pairs


def _exchange(asm: Asm, words: Sequence[str], upper: str) -> list[list[str]]:
    """From 16 bytes a lane, 64 bytes of a row, to two words a lane of each of its two blocks.

    Lanes t < 2 hold the first block; they keep their words 0 and 1 and give 2 and 3 to lane t + 2, for its 0 and 1.
    """
    first, second = [], []
    for k in range(2):
        given = asm.emit("selp.b32", words[k], words[k + 2], upper)
        taken = asm.emit("shfl.sync.bfly.b32", given, "2", "0x1f", "0xffffffff")
        first.append(asm.emit("selp.b32", taken, words[k], upper))
        second.append(asm.emit("selp.b32", words[k + 2], taken, upper))
    return [first, second]


@lru_cache
def _product_asm(groups: int, tile: int, first: int) -> tuple[str, str]:
    """(PTX, constraints): total + scale * (words . x) over two blocks, from block `first` of the step on.

    Arrays: total (also the result), 2 / groups of words, scales, the table's offset for this lane, and x of a lane's
    first and second word of either block.
    """
    pack = 4 * groups
    num_words = 2 // groups
    name = lambda array, i: f"${array * pack + i}"  # noqa: E731
    asm = Asm()
    asm.lines += [".reg .f32 zero;", "mov.f32 zero, 0f00000000;", ".reg .pred upper;"]
    lane = asm.emit("mov.u32", "%laneid")
    asm.lines.append(f"setp.ne.u32 upper, {asm.emit('and.b32', lane, '2')}, 0;")
    asm.lines += [".reg .b32 pairs;", "mov.u32 pairs, nf4_pairs;"]
    scales, offset = 2 + num_words, name(3 + num_words, 0)
    sums = [name(1, i) for i in range(pack)]
    halves = [[name(2 + h // groups, 4 * (h % groups) + k) for k in range(4)] for h in range(2)]
    row_words = [_exchange(asm, words, "upper") for words in halves]
    for block in range(2):
        place = first + block
        scale = []
        for half in range(2):
            register = 2 * half + place // 4 if groups == 1 else 4 * half + 2 * tile + place // 4
            # From lane t = place mod 4 of the same four.
            operands = (name(scales, register), str(place % 4), "0x1c1f", "0xffffffff")
            scale.append(asm.emit("shfl.sync.idx.b32", *operands, kind="f32"))
        parts = [["zero"] * 4 for _ in range(groups)]
        for side in range(2):
            pairs = [_decode(asm, words[block][side], offset) for words in row_words]
            for pair in (0, 2):
                a = [pairs[half][pair + k] for k in range(2) for half in range(2)]
                for group in range(groups):
                    b = [name(4 + num_words + 2 * block + side, 4 * group + pair + k) for k in range(2)]
                    parts[group] = asm.mma(a, b, parts[group])
        for i in range(pack):
            sums[i] = asm.emit("fma.rn.f32", parts[i // 4][i % 4], scale[i % 4 // 2], sums[i], kind="f32")
    asm.lines += [f"mov.f32 {name(0, i)}, {sums[i]};" for i in range(pack)]
    kinds = ["=f", "f", *["r"] * num_words, "f", "r", *["r"] * 4]
    return asm.text(), ",".join(kind for kind in kinds for _ in range(pack))


def asm_call(text: str, constraints: str, arrays, pack: int, dtype) -> jax.Array:
    return plgpu.elementwise_inline_asm(
        text,
        args=arrays,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arrays[0].shape, dtype)],
    )[0]


def bfloat16_halves(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 values of the lower and of the upper half of each uint32."""
    lower, upper = words << 16, words & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(lower, jnp.float32), jax.lax.bitcast_convert_type(upper, jnp.float32)


def product(total, words, scales, offset, xs, table_ref, tiles: FewRowsTiles, tile: int, first: int):
    """total + scale * (words . x) over two blocks, from block `first` of the step on. Arrays as in `_product_asm`."""
    text, constraints = _product_asm(tiles.groups, tile, first)
    return asm_call(text, constraints, [total, *words, scales, offset, *xs], 4 * tiles.groups, jnp.float32)


def product_interpreted(total, words, scales, offset, xs, table_ref, tiles: FewRowsTiles, tile: int, first: int):
    """What `product`'s instructions do, lane by lane."""
    groups = tiles.groups
    by_lane = (groups, tiles.num_warps, 8, 4)
    words = jnp.stack([word.reshape(*by_lane, 4) for word in words]).reshape(2, *by_lane[1:], 4)
    # [row half, warp, g, block, chunk of 16 bytes, words 0-1 or 2-3, word]: lane t takes chunk t mod 2, words of t / 2.
    words = words.reshape(2, -1, 8, 2, 2, 2, 2).swapaxes(4, 5).reshape(2, -1, 8, 2, 4, 2)
    bytes_ = jnp.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], axis=-1).astype(jnp.int32)
    weights = jnp.stack(bfloat16_halves(plgpu.load(table_ref.at[bytes_])), axis=-1)
    weights = weights.reshape(*words.shape, 8)
    scales = scales.reshape(*by_lane, 2, 2)
    total = total.reshape(*by_lane, 2, 2)
    for block in range(2):
        place = first + block
        scale = scales[..., place % 4, :, place // 4]
        scale = scale[0] if groups == 1 else scale[..., tile].transpose(1, 2, 0)
        part = jnp.zeros((groups, tiles.num_warps, 8, 2, 8), jnp.float32)
        for side in range(2):
            x = jnp.stack(bfloat16_halves(xs[2 * block + side].reshape(*by_lane, 4)), axis=-1)
            part += jnp.einsum("hwgti,rwnti->rwghn", weights[:, :, :, block, :, side], x.reshape(*by_lane, 8))
        part = (part * scale[..., None]).reshape(groups, -1, 8, 2, 4, 2)
        total = total + part.swapaxes(3, 4)
    return total.reshape(-1)


def adapter_product(total, a, bs, tiles: FewRowsTiles, interpret: bool):
    """total + a . b over tiles.groups times 16 columns; in a thread, a is [step, half of the rows, of the columns]."""
    groups, num_warps = tiles.groups, tiles.num_warps
    pack = 4 * groups
    if interpret:
        by_lane = (groups, num_warps, 8, 4)
        total = total.reshape(*by_lane, 2, 2)
        a = jnp.stack(bfloat16_halves(a.reshape(*by_lane, 2, 2)), axis=-1)
        for step, b in enumerate(bs):
            b = jnp.stack(bfloat16_halves(b.reshape(*by_lane, 2, 2)[..., 0, :]), axis=-1)
            part = jnp.einsum("wgthcp,rwntcp->rwghn", a[step], b).reshape(groups, num_warps, 8, 2, 4, 2)
            total = total + part.swapaxes(3, 4)
        return total.reshape(-1)
    name = lambda array, i: f"${array * pack + i}"  # noqa: E731
    asm = Asm()
    for group in range(groups):
        result = [name(1, 4 * group + j) for j in range(4)]
        for step in range(groups):
            # The instruction wants the row halves next to one another.
            operand = [name(2, 4 * step + 2 * half + column) for column in range(2) for half in range(2)]
            result = asm.mma(operand, [name(3 + step, 4 * group + column) for column in range(2)], result)
        asm.lines += [f"mov.f32 {name(0, 4 * group + j)}, {result[j]};" for j in range(4)]
    constraints = ["=f"] * pack + ["f"] * pack + ["r"] * pack * (1 + groups)
    return asm_call(asm.text(), ",".join(constraints), [total, a, *bs], pack, jnp.float32)

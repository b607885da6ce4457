"""One warp's share of the product for few rows: lanes, PTX, and what its instructions do, for the interpreter.

The layout of elements over threads is that of `pallas_triton_few_rows`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


class Lanes(NamedTuple):
    """Where each element of a flat array belongs, int32 arrays: see the module's docstring."""

    warp: jax.Array
    g: jax.Array
    t: jax.Array
    half: jax.Array
    side: jax.Array
    j: jax.Array


def make_lanes(num_warps: int) -> Lanes:
    # Quotients and remainders of a range, which Triton's analysis of contiguous addresses understands.
    e = jnp.arange(128 * num_warps)
    return Lanes(
        warp=jax.lax.div(e, 128),
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

    def give(self, registers: Sequence[str], kind: str = "b32") -> None:
        """Makes the registers the result."""
        self.lines += [f"mov.{kind} {argument(0, i)}, {register};" for i, register in enumerate(registers)]

    def text(self) -> str:
        declared = [f".reg .{kind} {kind[0]}<{num}>;" for kind, num in self.num_registers.items() if num]
        return "\n".join(["{", *declared, *self.lines, "}"])


def argument(array: int, i: int) -> str:
    """Element i of a thread's four of the result, array 0, or of an argument, from 1 on."""
    return f"${4 * array + i}"


def asm_call(text: str, arrays: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Runs PTX over arrays of four elements a thread. It has one result: jax 0.10 and 0.11 cannot lower more."""
    kinds = ["=f" if dtype == jnp.float32 else "=r"]
    kinds += ["f" if array.dtype == jnp.float32 else "r" for array in arrays]
    # Triton's results are signed.
    (result,) = plgpu.elementwise_inline_asm(
        text,
        args=arrays,
        constraints=",".join(kind for kind in kinds for _ in range(4)),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arrays[0].shape, jnp.int32 if dtype == jnp.uint32 else dtype)],
    )
    return jax.lax.bitcast_convert_type(result, dtype)


def _with_upper() -> Asm:
    """PTX whose predicate `upper` holds in lanes t >= 2."""
    asm = Asm()
    asm.lines.append(".reg .pred upper;")
    lane = asm.emit("mov.u32", "%laneid")
    asm.lines.append(f"setp.ne.u32 upper, {asm.emit('and.b32', lane, '2')}, 0;")
    return asm


def exchange(first_rows: jax.Array, second_rows: jax.Array, interpret: bool) -> list[jax.Array]:
    """From 64 bytes of a row a lane's four, to the words of one block and of the next, two of either row.

    Lanes t < 2 hold the first block; they keep their words 0 and 2 and give 1 and 3 to lane t + 2, for its 0 and 2. So
    lane t has the words w and w + 2, w = 4 (t mod 2) + t / 2.
    """
    if interpret:
        # [row half, warp and g, block, chunk of 16 bytes, words 0-1 or 2-3, word] to words of lane t.
        both = jnp.stack([first_rows, second_rows]).reshape(2, -1, 2, 2, 2, 2)
        return [both[:, :, block].transpose(1, 4, 2, 0, 3).reshape(-1) for block in range(2)]
    asm = _with_upper()
    taken = []
    for half in range(2):
        for k in range(2):
            given = asm.emit("selp.b32", argument(1 + half, 2 * k), argument(1 + half, 2 * k + 1), "upper")
            taken.append(asm.emit("shfl.sync.bfly.b32", given, "2", "0x1f", "0xffffffff"))
    asm.give(taken)
    words = [first_rows, second_rows, asm_call(asm.text(), [first_rows, second_rows], jnp.uint32)]
    blocks = []
    for block in range(2):
        asm = _with_upper()
        kept = [(argument(1 + half, 2 * k + block), argument(3, 2 * half + k)) for half in range(2) for k in range(2)]
        asm.give([asm.emit("selp.b32", *(pair if block else pair[::-1]), "upper") for pair in kept])
        blocks.append(asm_call(asm.text(), words, jnp.uint32))
    return blocks


def low_and_high(words: jax.Array, lane_bytes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of every byte of codes the low seven bits; and its high bit, with the lane's column below it."""
    return words & jnp.uint32(0x7F7F7F7F), words & jnp.uint32(0x80808080) | lane_bytes


def decode(halves, places: tuple[int, int], table_ref, pair: int, interpret: bool) -> jax.Array:
    """Weights as bfloat16 pairs: an element (k, row half) is byte 2 * pair + k of a word, as `multiply` wants it.

    halves: of rows g and of rows g + 8, of `low_and_high`; places: of the word in a lane's four.
    """
    if interpret:
        bytes_ = []
        for k in range(2):
            for (low, high), place in zip(halves, places, strict=True):
                low, high = (bits.reshape(-1, 4)[:, place] >> (8 * (2 * pair + k)) for bits in (low, high))
                bytes_.append(low & 127 | high & 128)
        return plgpu.load(table_ref.at[jnp.stack(bytes_, axis=1).astype(jnp.int32).reshape(-1)])
    asm = Asm()
    base = asm.emit("mov.u32", "nf4_pairs")
    values = []
    for byte in (2 * pair, 2 * pair + 1):
        # Byte 0 of the place: the high bit and the column; byte 1: the low bits; above, their sign, which is 0.
        selector = hex((12 + byte) * 0x1100 | (4 + byte) << 4 | byte)
        for half, place in enumerate(places):
            low, high = (argument(1 + 2 * half + i, place) for i in range(2))
            offset = asm.emit("prmt.b32", high, low, selector)
            values.append(asm.emit("ld.shared.b32", f"[{asm.emit('add.u32', offset, base)}]"))
    asm.give(values)
    return asm_call(asm.text(), [array for half in halves for array in half], jnp.uint32)


def _bfloat16_halves(words: jax.Array) -> jax.Array:
    """float32 [..., 2]: the lower and the upper half of each uint32."""
    halves = jnp.stack([words << 16, words & jnp.uint32(0xFFFF0000)], axis=-1)
    return jax.lax.bitcast_convert_type(halves, jnp.float32)


def multiply(total: jax.Array, a: jax.Array, b: jax.Array, pair: int, interpret: bool) -> jax.Array:
    """total + a . b over 16 terms; elements of a are (k, row half), of b (pair, k), k being a half of the terms."""
    if interpret:
        a = _bfloat16_halves(a.reshape(-1, 8, 4, 2, 2))
        b = _bfloat16_halves(b.reshape(-1, 8, 4, 2, 2)[:, :, :, pair])
        part = jnp.einsum("wgtkhc,wntkc->wghn", a, b).reshape(-1, 8, 2, 4, 2)
        return total + part.swapaxes(2, 3).reshape(-1)
    sources = [(0, 4, 0), (2, 4, 0), (3, 2, 2 * pair), (1, 4, 0)]
    groups = ["{" + ", ".join(argument(array, first + i) for i in range(num)) + "}" for array, num, first in sources]
    return asm_call(f"{_MMA} {', '.join(groups)};", [total, a, b], jnp.float32)


def add_scaled(total: jax.Array, part: jax.Array, scales: jax.Array, side: int, lane: int | None, interpret: bool):
    """total + scale * part; scales are (row half, side), of the lane itself or of lane t = `lane` of its four."""
    if interpret:
        of_side = scales.reshape(-1, 4, 2, 2)[..., side, None]
        of_lane = of_side if lane is None else of_side[:, lane, None]
        return total + (part.reshape(-1, 4, 2, 2) * of_lane).reshape(-1)
    asm = Asm()
    sums = []
    for half in range(2):
        scale = argument(3, 2 * half + side)
        if lane is not None:
            scale = asm.emit("shfl.sync.idx.b32", scale, str(lane), "0x1c1f", "0xffffffff", kind="f32")
        for i in (2 * half, 2 * half + 1):
            sums.append(asm.emit("fma.rn.f32", argument(2, i), scale, argument(1, i), kind="f32"))
    asm.give(sums, "f32")
    return asm_call(asm.text(), [total, part, scales], jnp.float32)


def fold(total: jax.Array, interpret: bool) -> jax.Array:
    """total, plus that of lane t + 2 or t - 2."""
    if interpret:
        by_block = total.reshape(-1, 2, 8)
        return (by_block + by_block[:, ::-1]).reshape(-1)
    asm = Asm()
    sums = []
    for i in range(4):
        other = asm.emit("shfl.sync.bfly.b32", argument(1, i), "2", "0x1f", "0xffffffff", kind="f32")
        sums.append(asm.emit("add.f32", argument(1, i), other, kind="f32"))
    asm.give(sums, "f32")
    return asm_call(asm.text(), [total], jnp.float32)

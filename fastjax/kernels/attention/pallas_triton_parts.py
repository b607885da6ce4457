"""What the attention kernels share: what a program knows, its arithmetic, and how it loads and stores rows."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.attention.blocks import Tiles
from fastjax.kernels.attention.options import LOG2_E, Options


@dataclass(frozen=True)
class Call:
    """What every program of a kernel knows.

    Attributes:
      num_queries, num_keys, head_dim: T, S and H; tiles are padded beyond them.
      group: query heads a key/value head.
      rows, keys: queries and keys of one tile.
      exact: operands are float32 and products must not be rounded to TF32.
      interpret: inline assembly is replaced by what it computes.
    """

    options: Options
    num_queries: int
    num_keys: int
    head_dim: int
    group: int
    rows: int
    keys: int
    exact: bool
    interpret: bool

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, options: Options, tiles: Tiles, interpret: bool) -> "Call":
        """For query [B, T, N, H] and key [..., S, K, H]."""
        num_queries, num_heads, head_dim = query.shape[1:]
        num_keys, num_kv_heads = key.shape[-3:-1]
        group, exact = num_heads // num_kv_heads, query.dtype == jnp.float32
        return cls(options, num_queries, num_keys, head_dim, group, tiles.rows, tiles.keys, exact, interpret)

    @property
    def padded_head(self) -> int:
        return max(16, pl.next_power_of_2(self.head_dim))

    @property
    def padded_queries(self) -> int:
        return pl.cdiv(self.num_queries, self.rows) * self.rows

    @property
    def padded_keys(self) -> int:
        return pl.cdiv(self.num_keys, self.keys) * self.keys

    @property
    def exponent_scale(self) -> float:
        """Factor of a raw product in the exponent of 2; with a soft cap the scores are scaled beforehand."""
        return LOG2_E if self.options.softcap is not None else self.options.scale * LOG2_E

    def dot(self, a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
        """a . b, or a . b^T, summed in float32."""
        dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
        precision: Any = None
        if self.exact:
            # Three TF32 products are as good as float32 ones here, and run on the tensor cores.
            highest = jax.lax.Precision.HIGHEST
            precision = highest if self.interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    def exp2(self, x: jax.Array) -> jax.Array:
        """2^x; results below the smallest normal number become 0."""
        if self.interpret:
            return jnp.exp2(x)
        return _assembly("ex2.approx.ftz.f32 $0, $1;", "=f,f", x)

    def multiply_add(self, a: jax.Array, b: float | jax.Array, c: jax.Array) -> jax.Array:
        """a b + c in one instruction: the compiler here does not contract the two by itself."""
        shape = jnp.broadcast_shapes(a.shape, c.shape)
        b = jnp.asarray(b, jnp.float32)
        a, b, c = (jnp.broadcast_to(x, shape) for x in (a, b, c))
        return a * b + c if self.interpret else _assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c)


def _assembly(code: str, constraints: str, *args: jax.Array) -> jax.Array:
    shape = [jax.ShapeDtypeStruct(args[0].shape, jnp.float32)]
    return plgpu.elementwise_inline_asm(code, args=args, constraints=constraints, pack=1, result_shape_dtypes=shape)[0]


def capped(call: Call, product: jax.Array) -> jax.Array:
    """The score before its exponent: the raw product, or with a soft cap the scaled and capped one."""
    cap = call.options.softcap
    return product if cap is None else cap * jnp.tanh(product * (call.options.scale / cap))


def cap_slope(call: Call, score: jax.Array) -> jax.Array | float:
    """d capped / d (scale product)."""
    cap = call.options.softcap
    return 1.0 if cap is None else 1.0 - (score / cap) * (score / cap)


def head_sections(num_heads: int, group: int, bytes_per_group: int, shared_mib: int) -> int:
    """How many heads, over all rows of the batch, run side by side: so few that what they share stays cached.

    A divisor of num_heads and a multiple of `group`, whose heads share `bytes_per_group`.
    """
    num_groups = num_heads // group
    wanted = max(1, shared_mib * 2**20 // max(bytes_per_group, 1))
    return group * max(d for d in range(1, num_groups + 1) if num_groups % d == 0 and d <= wanted)


def load_rows(ref, index: Any, call: Call, inside: jax.Array | None) -> jax.Array:
    """[tile, padded_head] of a [rows, padded_head] block; what lies outside of `inside` or of the head is 0."""
    mask = None
    if call.padded_head != call.head_dim:
        mask = (jnp.arange(call.padded_head) < call.head_dim)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else inside[:, None] & mask
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=0.0)


def store_rows(ref, values: jax.Array, call: Call, inside: jax.Array | None) -> None:
    mask = None
    if call.padded_head != call.head_dim:
        mask = (jnp.arange(call.padded_head) < call.head_dim)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else inside[:, None] & mask
    plgpu.store(ref, values.astype(ref.dtype), mask=mask)


def statistics(lse: jax.Array, inside: jax.Array | None) -> jax.Array:
    """lse in base 2; infinite, which makes every weight 0, for rows without keys and outside of the array."""
    absent = lse == -jnp.inf
    if inside is not None:
        absent |= ~inside
    return jnp.where(absent, jnp.inf, lse * LOG2_E)


def load_numbers(ref, index, inside: jax.Array | None) -> jax.Array:
    if inside is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=inside, other=0.0)

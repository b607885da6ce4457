"""SwiGLU as Pallas-Triton kernels: one pass over memory forward, one backward.

With a = sigmoid(gate):  y = gate a up,  dup = dy gate a,  dgate = dy up a (1 + gate (1 - a)).

gate and up are arrays of their own or the halves of the rows of one, [gate | up], and so are their gradients.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.swiglu.blocks import Tiles, swiglu_tiles


def _tile(width: int, tiles: Tiles):
    """(row, columns, mask or None) of this program."""
    column = pl.program_id(1) * tiles.columns + jnp.arange(tiles.columns)
    return pl.program_id(0), column, None if width % tiles.columns == 0 else column < width


def _halves(refs, row, column, width: int):
    """Where gate and up, or their gradients, of this tile are in one ref or two."""
    if len(refs) == 2:
        return refs[0].at[row, column], refs[1].at[row, column]
    return refs[0].at[row, column], refs[0].at[row, width + column]


def _load(places, mask):
    other = None if mask is None else 0
    return [plgpu.load(place, mask=mask, other=other).astype(jnp.float32) for place in places]


def _forward_kernel(*refs, width: int, tiles: Tiles):
    """Refs: gate and up, or both joined; y."""
    *inputs, y_ref = refs
    row, column, mask = _tile(width, tiles)
    gate, up = _load(_halves(inputs, row, column, width), mask)
    plgpu.store(y_ref.at[row, column], (gate * jax.nn.sigmoid(gate) * up).astype(y_ref.dtype), mask=mask)


def _backward_kernel(*refs, width: int, tiles: Tiles):
    """Refs: gate and up, or both joined; dy; dgate and dup, or both joined."""
    middle = len(refs) // 2
    inputs, dy_ref, outputs = refs[:middle], refs[middle], refs[middle + 1 :]
    row, column, mask = _tile(width, tiles)
    gate, up = _load(_halves(inputs, row, column, width), mask)
    (dy,) = _load([dy_ref.at[row, column]], mask)
    sigmoid = jax.nn.sigmoid(gate)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dgate_place, dup_place = _halves(outputs, row, column, width)
    plgpu.store(dgate_place, dgate.astype(dy_ref.dtype), mask=mask)
    plgpu.store(dup_place, (dy * gate * sigmoid).astype(dy_ref.dtype), mask=mask)


def _call(kernel, name: str, width: int, operands, like, interpret: bool):
    """`kernel` over [rows, width]; outputs are like the arrays in `like`."""
    tiles = swiglu_tiles(width)
    return pl.pallas_call(
        partial(kernel, width=width, tiles=tiles),
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like),
        grid=(len(operands[0]), pl.cdiv(width, tiles.columns)),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def swiglu_pallas(inputs: tuple[jax.Array, ...], interpret: bool) -> jax.Array:
    """(gate, up), [rows, F] each, or ([gate | up],), [rows, 2 F], to [rows, F]; see `fastjax.kernels.swiglu`."""
    width = inputs[0].shape[1] * len(inputs) // 2
    like = jax.ShapeDtypeStruct((len(inputs[0]), width), inputs[0].dtype)
    return _call(_forward_kernel, "swiglu", width, inputs, (like,), interpret)[0]


def _forward(inputs, interpret):
    return swiglu_pallas(inputs, interpret), inputs


def _backward(interpret, inputs, dy):
    return (tuple(_call(_backward_kernel, "swiglu_backward", dy.shape[1], (*inputs, dy), inputs, interpret)),)


swiglu_pallas.defvjp(_forward, _backward)

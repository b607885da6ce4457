"""SwiGLU as Pallas-Triton kernels: one pass over memory forward, one backward.

With a = sigmoid(gate):  y = gate a up,  dup = dy gate a,  dgate = dy up a (1 + gate (1 - a)).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.swiglu.blocks import Tiles, swiglu_tiles


def _operands(refs, width: int, tiles: Tiles):
    """(index, mask or None, float32 values of refs) of this program's tile."""
    column = pl.program_id(1) * tiles.columns + jnp.arange(tiles.columns)
    index = (pl.program_id(0), column)
    mask = None if width % tiles.columns == 0 else column < width
    other = None if mask is None else 0
    return index, mask, [plgpu.load(ref.at[index], mask=mask, other=other).astype(jnp.float32) for ref in refs]


def _forward_kernel(gate_ref, up_ref, y_ref, *, width: int, tiles: Tiles):
    index, mask, (gate, up) = _operands((gate_ref, up_ref), width, tiles)
    plgpu.store(y_ref.at[index], (gate * jax.nn.sigmoid(gate) * up).astype(y_ref.dtype), mask=mask)


def _backward_kernel(gate_ref, up_ref, dy_ref, dgate_ref, dup_ref, *, width: int, tiles: Tiles):
    index, mask, (gate, up, dy) = _operands((gate_ref, up_ref, dy_ref), width, tiles)
    sigmoid = jax.nn.sigmoid(gate)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    plgpu.store(dgate_ref.at[index], dgate.astype(dgate_ref.dtype), mask=mask)
    plgpu.store(dup_ref.at[index], (dy * gate * sigmoid).astype(dup_ref.dtype), mask=mask)


def _call(kernel, name: str, num_outputs: int, operands, interpret: bool):
    num_rows, width = operands[0].shape
    tiles = swiglu_tiles(width)
    like = jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)
    return pl.pallas_call(
        partial(kernel, width=width, tiles=tiles),
        out_shape=(like,) * num_outputs,
        grid=(num_rows, pl.cdiv(width, tiles.columns)),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def swiglu_pallas(gate: jax.Array, up: jax.Array, interpret: bool) -> jax.Array:
    """[rows, F] twice to [rows, F]; see `fastjax.kernels.swiglu.swiglu`."""
    return _call(_forward_kernel, "swiglu", 1, (gate, up), interpret)[0]


def _forward(gate, up, interpret):
    return swiglu_pallas(gate, up, interpret), (gate, up)


def _backward(interpret, residuals, dy):
    dgate, dup = _call(_backward_kernel, "swiglu_backward", 2, (*residuals, dy), interpret)
    return dgate, dup


swiglu_pallas.defvjp(_forward, _backward)

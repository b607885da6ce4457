"""The public function: input checks, choice of implementation, and the gradient."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.lora.many_rows import joined_backward, joined_forward, transposed_product
from fastjax.kernels.nf4.api import check_one_layer, dequantize
from fastjax.kernels.nf4.tables import BLOCK_SIZE
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.blocks import fused_is_faster
from fastjax.kernels.quant_matmul.pallas_triton import quant_matmul_gradient_pallas, quant_matmul_pallas
from fastjax.kernels.quant_matmul.reference import product

Weight = Float[Array, "out in"] | QuantizedWeight


def lora_matmul(
    x: Float[Array, "*rows in"],
    weight: Weight | Sequence[Weight],
    lora_a: Float[Array, "R in"] | Sequence[Float[Array, "R in"]],
    lora_b: Float[Array, "out R"] | Sequence[Float[Array, "out R"]],
    scale: Float[Array, ""] | float | Sequence[Float[Array, ""] | float],
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows out"] | tuple[Float[Array, "*rows out"], ...]:
    """A linear layer with a low-rank adapter: y = x . W^T + scale (x . A^T) . B^T, of one projection or several of x.

    Sums are float32; y has x's dtype, in which A and scale * B are read. W and scale get no gradient; those of A and B
    have their dtypes. The backward keeps only x (and the parameters) and computes x . A again.

    Args:
      x: [..., in] float.
      weight: [out, in] float, or one layer's QuantizedWeight; or a sequence of them, projections of the same x, which
        are then done together where that is faster. lora_a, lora_b and scale are sequences as well then.
      lora_a: [R, in] float.
      lora_b: [out, R] float.
      scale: scalar, alpha / R or alpha / sqrt(R).
      implementation: "pallas_triton" adds the adapter's product inside the kernel that decodes a 4-bit weight; "joined"
        decodes the 4-bit weights into one buffer for one matmul, with the adapter in further columns or added after it;
        "separate" takes one projection and one product after the other, and any weight. None takes the fastest that
        can run here, by measurement; a name is used or fails.
      interpret: run Pallas kernels in jax's interpreter, on any device.
    Returns: [..., out] in x's dtype; a tuple of them for a sequence of weights.
    Raises: ValueError for shapes that do not fit or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    Source: LoRA (arXiv:2106.09685), equation 3. "joined" takes dx = dy . (W + scale B A), rounded once to x's dtype.
    """
    if isinstance(weight, Sequence):
        groups = (tuple(weight), *(tuple(v) for v in (lora_a, lora_b, scale)))  # type: ignore[arg-type]
    else:
        groups = ((weight,), (lora_a,), (lora_b,), (scale,))
    weights, lora_as, lora_bs, scales = groups
    _check(x, weights, lora_as, lora_bs, scales)
    rows = x.reshape(-1, x.shape[-1])
    implementation = choose("lora_matmul", implementation, _implementations(len(rows), weights, interpret))
    scales = tuple(jnp.asarray(s, jnp.float32) for s in scales)
    outputs = _lora_matmul(rows, weights, lora_as, lora_bs, scales, implementation, interpret)
    shaped = tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in outputs)
    return shaped if isinstance(weight, Sequence) else shaped[0]


def _check(x, weights, lora_as, lora_bs, scales) -> None:
    if not weights or not len(weights) == len(lora_as) == len(lora_bs) == len(scales):
        raise ValueError(
            f"{len(weights)} weights, {len(lora_as)} lora_a, {len(lora_bs)} lora_b and {len(scales)} scales: "
            "give one of each a projection"
        )
    for weight, a, b in zip(weights, lora_as, lora_bs, strict=True):
        if isinstance(weight, QuantizedWeight):
            check_one_layer(weight)
        num_out, num_in = weight.shape
        if x.shape[-1] != num_in:
            raise ValueError(f"x {x.shape} and weight {weight.shape}: expected [..., in] and [out, in]")
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != num_in or b.shape != (num_out, a.shape[0]):
            raise ValueError(
                f"lora_a {a.shape} and lora_b {b.shape} for a weight {weight.shape}: expected [R, in] and [out, R]"
            )


def _implementations(num_rows: int, weights: tuple, interpret: bool) -> dict[str, str | None]:
    """Name -> why it cannot run here, or None; the faster first."""
    reason = triton_reason(interpret)
    if not all(isinstance(weight, QuantizedWeight) for weight in weights):
        reason = "takes 4-bit weights only"
    elif weights[0].shape[1] % BLOCK_SIZE != 0:
        reason = f"takes `in` in multiples of {BLOCK_SIZE}; these weights have in={weights[0].shape[1]}"
    names = ("pallas_triton", "joined") if fused_is_faster(num_rows) else ("joined", "pallas_triton")
    return {**dict.fromkeys(names, reason), "separate": None}


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _lora_matmul(x, weights, lora_as, lora_bs, scales, implementation: str, interpret: bool) -> tuple[jax.Array, ...]:
    scaled = [scale * b for scale, b in zip(scales, lora_bs, strict=True)]
    if implementation == "joined":
        y = joined_forward(x, weights, lora_as, scaled, interpret)
        return tuple(jnp.split(y, _ends(weights), axis=1))
    xa = jnp.split(product(x, jnp.concatenate(lora_as).astype(x.dtype)), _ends(lora_as), axis=1)
    scaled = [b.astype(x.dtype) for b in scaled]
    if implementation == "pallas_triton":
        return tuple(
            quant_matmul_pallas(x, weight, (one_xa, b), interpret=interpret)
            for weight, one_xa, b in zip(weights, xa, scaled, strict=True)
        )
    return tuple(
        product(x, _matrix(weight, x.dtype, interpret)) + product(one_xa, b)
        for weight, one_xa, b in zip(weights, xa, scaled, strict=True)
    )


def _ends(parts: tuple) -> list[int]:
    """Where one part's rows end and the next one's begin, in the joined rows."""
    ends, total = [], 0
    for part in parts[:-1]:
        total += part.shape[0]
        ends.append(total)
    return ends


def _matrix(weight, dtype: jnp.dtype, interpret: bool) -> jax.Array:
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, dtype, interpret=interpret)
    return weight.astype(dtype)


def _forward(x, weights, lora_as, lora_bs, scales, implementation, interpret):
    outputs = _lora_matmul(x, weights, lora_as, lora_bs, scales, implementation, interpret)
    return outputs, (x, weights, lora_as, lora_bs, scales)


def _backward(implementation, interpret, residuals, douts):
    x, weights, lora_as, lora_bs, scales = residuals
    scaled = [scale * b for scale, b in zip(scales, lora_bs, strict=True)]
    if implementation == "joined":
        dx, dlora_as, dscaled = joined_backward(jnp.concatenate(douts, axis=1), x, weights, lora_as, scaled, interpret)
    else:
        dx, dlora_as, dscaled = _separate_backward(douts, x, weights, lora_as, scaled, implementation, interpret)
    dlora_as = [d.astype(a.dtype) for d, a in zip(dlora_as, lora_as, strict=True)]
    dlora_bs = [(scale * d).astype(b.dtype) for scale, d, b in zip(scales, dscaled, lora_bs, strict=True)]
    return dx, None, tuple(dlora_as), tuple(dlora_bs), None


def _separate_backward(douts, x, weights, lora_as, scaled, implementation, interpret):
    """(dx, float32 dA, float32 dB of the scaled B), one projection after the other; dx is summed in float32."""
    xa = jnp.split(product(x, jnp.concatenate(lora_as).astype(x.dtype)), _ends(lora_as), axis=1)
    dx, das, dbs = jnp.zeros(x.shape, jnp.float32), [], []
    for dout, weight, a, b, one_xa in zip(douts, weights, lora_as, scaled, xa, strict=True):
        t = product(dout, b.astype(x.dtype), transposed=False)
        if implementation == "pallas_triton":
            base = quant_matmul_gradient_pallas(dout, weight, interpret=interpret)
        else:
            base = product(dout, _matrix(weight, x.dtype, interpret), transposed=False)
        dx = dx + base.astype(jnp.float32) + product(t, a.astype(x.dtype), transposed=False).astype(jnp.float32)
        das.append(transposed_product(t, x))
        dbs.append(transposed_product(dout, one_xa))
    return dx.astype(x.dtype), das, dbs


_lora_matmul.defvjp(_forward, _backward)

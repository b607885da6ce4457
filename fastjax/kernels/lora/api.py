"""The public function: input checks, choice of implementation, and the gradient."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.lora.many_rows import joined_adapters, joined_backward, joined_forward, transposed_product
from fastjax.kernels.nf4.api import check_one_layer, dequantize
from fastjax.kernels.nf4.tables import BLOCK_SIZE
from fastjax.kernels.nf4.weight import QuantizedWeight
from fastjax.kernels.quant_matmul.api import implementations as quant_matmul_implementations
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
    joined: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows out"] | tuple[Float[Array, "*rows out"], ...]:
    """A linear layer with a low-rank adapter: y = x . W^T + scale (x . A^T) . B^T, of one projection or several of x.

    Sums are float32; y has x's dtype, in which A and scale * B are read. W and scale get no gradient; those of A and B
    have their dtypes. The backward keeps x and x . A, the latter R / in of the former's size and named "lora_xa" for
    `jax.checkpoint`'s policies.

    Args:
      x: [..., in] float.
      weight: [out, in] float, or one layer's QuantizedWeight; or a sequence of them, projections of the same x, which
        are then done together where that is faster. lora_a, lora_b and scale are sequences as well then.
      lora_a: [R, in] float.
      lora_b: [out, R] float.
      scale: scalar, alpha / R or alpha / sqrt(R).
      joined: return the projections' columns side by side, as "joined" makes them, and take their gradient so.
      implementation: "pallas_triton" adds the adapter's product inside the kernel that decodes a 4-bit weight; "joined"
        decodes the 4-bit weights into one buffer for one matmul, with the adapter in further columns or added after it;
        "separate" takes one projection and one product after the other, and any weight. None takes the fastest that
        can run here, by measurement; a name is used or fails.
      interpret: run Pallas kernels in jax's interpreter, on any device.
    Returns: [..., out] in x's dtype; for a sequence of weights a tuple of them, or [..., sum of out] if `joined`.
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
    implementation = choose("lora_matmul", implementation, _implementations(rows, weights, interpret))
    scales = tuple(jnp.asarray(s, jnp.float32) for s in scales)
    outputs = _lora_matmul(rows, weights, lora_as, lora_bs, scales, joined, implementation, interpret)
    shaped = tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in outputs)
    return shaped if isinstance(weight, Sequence) and not joined else shaped[0]


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


def _implementations(x: jax.Array, weights: tuple, interpret: bool) -> dict[str, str | None]:
    """Name -> why it cannot run here, or None; the faster first. x is [M, in]."""
    fused = joined = triton_reason(interpret)
    if not all(isinstance(weight, QuantizedWeight) for weight in weights):
        fused = joined = "takes 4-bit weights only"
    else:
        fused = quant_matmul_implementations(x, weights, interpret)["pallas_triton"]
        if x.shape[1] % BLOCK_SIZE != 0:
            joined = f"takes `in` in multiples of {BLOCK_SIZE}; these weights have in={x.shape[1]}"
    if fused_is_faster(len(x)):
        return {"pallas_triton": fused, "joined": joined, "separate": None}
    return {"joined": joined, "pallas_triton": fused, "separate": None}


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _lora_matmul(
    x, weights, lora_as, lora_bs, scales, whole: bool, implementation: str, interpret: bool
) -> tuple[jax.Array, ...]:
    """The projections' outputs, or one array of all their columns if `whole`."""
    return _forward(x, weights, lora_as, lora_bs, scales, whole, implementation, interpret)[0]


def _forward(x, weights, lora_as, lora_bs, scales, whole, implementation, interpret):
    lora_a, lora_b = _joined(lora_as, lora_bs, scales, x.dtype)
    if implementation == "joined":
        y, xa = joined_forward(x, weights, lora_a, lora_b, interpret)
        outputs = [y] if whole else jnp.split(y, _ends(weights), axis=1)
    else:
        xa = product(x, lora_a)
        parts = zip(weights, *_by_projection(xa, lora_b, weights), strict=True)
        if implementation == "pallas_triton":
            outputs = [quant_matmul_pallas(x, weight, (xa, b), interpret=interpret) for weight, xa, b in parts]
        else:
            outputs = [product(x, _matrix(weight, x.dtype, interpret)) + product(xa, b) for weight, xa, b in parts]
        outputs = [jnp.concatenate(outputs, axis=1)] if whole else outputs
    return tuple(outputs), (x, checkpoint_name(xa, "lora_xa"), weights, lora_as, lora_bs, scales)


def _joined(lora_as, lora_bs, scales, dtype) -> tuple[jax.Array, jax.Array]:
    return joined_adapters(lora_as, [scale * b for scale, b in zip(scales, lora_bs, strict=True)], dtype)


def _ends(weights: tuple) -> list[int]:
    """Where one projection's rows end and the next one's begin, in the joined rows."""
    return list(accumulate(weight.shape[0] for weight in weights[:-1]))


def _by_projection(xa: jax.Array, lora_b: jax.Array, weights: tuple) -> tuple[list[jax.Array], list[jax.Array]]:
    return jnp.split(xa, len(weights), axis=1), jnp.split(lora_b, _ends(weights))


def _matrix(weight, dtype: jnp.dtype, interpret: bool) -> jax.Array:
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, dtype, interpret=interpret)
    return weight.astype(dtype)


def _backward(whole, implementation, interpret, residuals, douts):
    x, xa, weights, lora_as, lora_bs, scales = residuals
    lora_a, lora_b = _joined(lora_as, lora_bs, scales, x.dtype)
    if implementation == "joined":
        dout = douts[0] if whole else jnp.concatenate(douts, axis=1)
        dx, da, db = joined_backward(dout, x, xa, weights, lora_a, lora_b, interpret)
    else:
        douts = jnp.split(douts[0], _ends(weights), axis=1) if whole else douts
        dx, da, db = _separate_backward(douts, x, xa, weights, lora_a, lora_b, implementation, interpret)
    das, dbs = jnp.split(da, len(weights)), jnp.split(db, _ends(weights))
    dlora_as = tuple(d[: len(a)].astype(a.dtype) for d, a in zip(das, lora_as, strict=True))
    dlora_bs = tuple(
        (scale * d[:, : b.shape[1]]).astype(b.dtype) for scale, d, b in zip(scales, dbs, lora_bs, strict=True)
    )
    return dx, None, dlora_as, dlora_bs, None


def _separate_backward(douts, x, xa, weights, lora_a, lora_b, implementation, interpret):
    """(dx, float32 dA, float32 dB), as `joined_backward`; the projections' parts of dx are summed in float32."""
    dx, ts, dbs = jnp.zeros(x.shape, jnp.float32), [], []
    for dout, weight, one_xa, b in zip(douts, weights, *_by_projection(xa, lora_b, weights), strict=True):
        if implementation == "pallas_triton":
            base = quant_matmul_gradient_pallas(dout, weight, interpret=interpret)
        else:
            base = product(dout, _matrix(weight, x.dtype, interpret), transposed=False)
        dx = dx + base.astype(jnp.float32)
        ts.append(product(dout, b, transposed=False))
        dbs.append(transposed_product(dout, one_xa))
    t = jnp.concatenate(ts, axis=1)
    dx = dx + product(t, lora_a, transposed=False).astype(jnp.float32)
    return dx.astype(x.dtype), transposed_product(t, x), jnp.concatenate(dbs)


_lora_matmul.defvjp(_forward, _backward)

"""The public function: input checks and choice of implementation."""

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.rms_norm.pallas_triton import add_rms_norm_pallas, keep_rms_norm_pallas, rms_norm_pallas
from fastjax.kernels.rms_norm.reference import rms_norm_reference


def rms_norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    residual: Float[Array, "*rows D"] | None = None,
    with_sum: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows D"] | tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """y = weight * s / sqrt(mean(s^2) + eps) with s = x, or s = x + residual.

    Statistics in float32; the normalised s is rounded to x's dtype before it meets the weight, as Llama does. The
    backward reads s alone, and computes the statistics again. A sum with a residual is named "mid" for
    `jax.checkpoint`'s policies.

    Args:
      x: [..., D] float.
      weight: [D] float, read in x's dtype.
      eps: added to the mean square.
      residual: [..., D] in x's dtype, added first; the sum is rounded to x's dtype.
      with_sum: return s without a residual, too. Who uses x beside its norm and takes s for it has both gradients added
        in one pass.
      implementation: "pallas_triton" takes one pass forward and one backward; "reference". None takes the first that
        can run here, a name is used or fails.
      interpret: run the Pallas kernels in jax's interpreter, on any device.
    Returns: y, [..., D] in x's dtype; with a residual or `with_sum` the pair (s, y).
    Raises: ValueError for shapes or dtypes that do not fit or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    Source: arXiv:1910.07467; transformers' LlamaRMSNorm for the order of the casts.
    """
    if weight.ndim != 1 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {x.shape} and weight {weight.shape}: expected [..., D] and [D]")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(f"residual {residual.dtype} {residual.shape} must be as x, {x.dtype} {x.shape}")
    reasons = {"pallas_triton": triton_reason(interpret), "reference": None}
    if choose("rms_norm", implementation, reasons) == "reference":
        total = x if residual is None else checkpoint_name(x + residual, "mid")
        y = rms_norm_reference(total, weight, eps)
        return (total, y) if with_sum or residual is not None else y
    rows = x.reshape(-1, x.shape[-1])
    if residual is None and not with_sum:
        return rms_norm_pallas(rows, weight, eps, interpret).reshape(x.shape)
    if residual is None:
        total, y = keep_rms_norm_pallas(rows, weight, eps, interpret)
    else:
        total, y = add_rms_norm_pallas(rows, residual.reshape(rows.shape), weight, eps, interpret)
    return total.reshape(x.shape), y.reshape(x.shape)

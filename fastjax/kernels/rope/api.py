"""The public function: input checks and choice of implementation."""

from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.rope.pallas_triton import rope_pallas
from fastjax.kernels.rope.reference import rotate_reference


def rope(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    cos: Float[Array, "B T H/2"],
    sin: Float[Array, "B T H/2"],
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Queries and keys, each head's halves (a, b) turned to (a cos - b sin, b cos + a sin).

    Computed in float32 and rounded once. The backward turns back, and keeps nothing but the tables, which get no
    gradient.

    Args:
      query: [B, T, N, H] float.  key: [B, T, K, H] float.
      cos, sin: [B, T, H/2] float32 of each token's angles.
      implementation: "reference", which XLA makes one pass of, too, and fuses with its neighbours; or "pallas_triton".
        None takes the first, a name is used or fails.
      interpret: run the Pallas kernel in jax's interpreter, on any device.
    Returns: the pair, in the shapes and dtypes of query and key.
    Raises: ValueError for shapes that do not fit or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    Source: arXiv:2104.09864, in the half-split layout of transformers.
    """
    batch, length, _, size = query.shape
    table = (batch, length, size // 2)
    if size % 2 or key.shape[:2] != (batch, length) or key.shape[3] != size or not cos.shape == sin.shape == table:
        raise ValueError(
            f"query {query.shape}, key {key.shape}, cos {cos.shape} and sin {sin.shape}: expected [B, T, N, H], "
            "[B, T, K, H] and twice [B, T, H/2]"
        )
    reasons = {"reference": None, "pallas_triton": triton_reason(interpret)}
    if choose("rope", implementation, reasons) == "reference":
        return rotate_reference(query, cos, sin), rotate_reference(key, cos, sin)
    return rope_pallas(query, key, cos, sin, interpret)

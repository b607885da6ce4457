"""The public function: input checks and choice of implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.rope.pallas_triton import rope_joined_pallas, rope_pallas
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


def rope_joined(
    joined: Float[Array, "B T columns"],
    cos: Float[Array, "B T H/2"],
    sin: Float[Array, "B T H/2"],
    *,
    num_heads: int,
    num_kv_heads: int,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """`rope` of queries and keys that lie side by side with the values, as one matmul writes them.

    The gradient is written side by side, too.

    Args:
      joined: [B, T, (N + 2 K) H] float: query, key and value.
      cos, sin: see `rope`.
      num_heads: N.  num_kv_heads: K.
      implementation: "pallas_triton" takes all apart in one pass; "reference". None takes the first that can run here,
        a name is used or fails.
      interpret: see `rope`.
    Returns: query and key, turned, and value.
    Raises: ValueError for shapes that do not fit or an unknown `implementation`; NotImplementedError if
      `implementation` cannot run here.
    """
    batch, length, half = cos.shape
    size = 2 * half
    columns = (num_heads + 2 * num_kv_heads) * size
    if joined.shape != (batch, length, columns) or sin.shape != cos.shape:
        raise ValueError(
            f"joined {joined.shape}, cos {cos.shape} and sin {sin.shape}: expected [B, T, {columns}] and twice "
            f"[B, T, {half}] for {num_heads} and twice {num_kv_heads} heads"
        )
    reasons = {"pallas_triton": triton_reason(interpret), "reference": None}
    if choose("rope_joined", implementation, reasons) == "pallas_triton":
        return rope_joined_pallas(joined, cos, sin, (num_heads, num_kv_heads), interpret)
    ends = [num_heads * size, (num_heads + num_kv_heads) * size]
    query, key, value = (x.reshape(batch, length, -1, size) for x in jnp.split(joined, ends, axis=-1))
    return rotate_reference(query, cos, sin), rotate_reference(key, cos, sin), value

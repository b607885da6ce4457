"""The public function: input checks and the size of a chunk."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fastjax.kernels._dispatch import choose, triton_reason
from fastjax.kernels.linear_cross_entropy.chunked import Options, linear_cross_entropy_chunked


def linear_cross_entropy(
    hidden: Float[Array, "N D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " N"],
    loss_weights: Float[Array, " N"],
    *,
    train_weight: bool = False,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    vocab_axis: str | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, ""]:
    """Summed cross-entropy of a linear head: sum_i loss_weights[i] * -log softmax(weight . hidden_i)[targets[i]].

    Logits, softmax and sums are float32 and exist for `chunk_size` tokens at a time. Tokens of weight 0 cost nothing
    and may hold anything. The gradients are written in the forward pass.

    Args:
      hidden: [N, D] float, the head's input.
      weight: [V, D] float, the head, in hidden's dtype or another; it is read in hidden's dtype.
      targets: [N] int in [0, V); ignored where the weight is 0.
      loss_weights: [N] float >= 0.
      train_weight: whether the gradient of `weight` is computed ([V, D] float32); if not, it is zero.
      softcap: c for logits c tanh(z / c); None means none.
      z_loss: k for a further loss of k logsumexp(logits)^2 a token, under the same weights.
      chunk_size: tokens a chunk; None takes a quarter of N between 128 and 2048.
      vocab_axis: inside `jax.shard_map`, the mesh axis along which the head is split: weight is this rank's [V / ranks,
        D], in order, targets stay in [0, V), and every rank gets the whole loss. Maxima, sums and target logits are
        exchanged, logits never. The gradient of `hidden` is this rank's part: the caller sums them.
      implementation: of the step from a chunk's logits to their gradient: "pallas_triton" reads them twice and writes
        once; "xla" is plain jnp. None takes the first that can run here, a name is used or fails.
      interpret: run the Pallas kernel in jax's interpreter, on any device.
    Returns: float32 scalar.
    Raises: ValueError for shapes that do not fit, a chunk_size below 1 or an unknown `implementation`;
      NotImplementedError if `implementation` cannot run here.
    Source: chunked loss with the gradient in the forward: Liger Kernel (arXiv:2410.10989), section 3.2; the skipping
      of unweighted tokens is ours.
    """
    num_tokens = hidden.shape[0]
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {hidden.shape} and weight {weight.shape}: expected [N, D] and [V, D]")
    if targets.shape != (num_tokens,) or loss_weights.shape != (num_tokens,):
        raise ValueError(
            f"targets {targets.shape} and loss_weights {loss_weights.shape}: expected [N] = {(num_tokens,)} both"
        )
    if chunk_size is None:
        # At least four chunks where there is enough to split, so that all logits never exist; at most 2048 tokens,
        # where a GPU's matmul has long reached its full rate.
        chunk_size = min(2048, max(128, num_tokens // 4))
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")
    reasons = {"pallas_triton": triton_reason(interpret), "xla": None}
    if vocab_axis is not None:
        reasons["pallas_triton"] = "sees whole rows of logits, and vocab_axis splits them"
    implementation = choose("linear_cross_entropy", implementation, reasons)
    options = Options(train_weight, softcap, z_loss, min(chunk_size, num_tokens), vocab_axis, implementation, interpret)
    hidden, weight, targets, loss_weights = map(jnp.asarray, (hidden, weight, targets, loss_weights))
    return linear_cross_entropy_chunked(hidden, weight.astype(hidden.dtype), targets, loss_weights, options)

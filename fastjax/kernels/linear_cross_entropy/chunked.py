"""Chunked cross-entropy of a linear head: the gradient is computed beside the loss, chunk by chunk.

With z_i = W h_i, m_i = loss_weights[i] and p_i = softmax(z_i):

    loss  = sum_i m_i (l_i - z_i[y_i] + k l_i^2)          l_i = logsumexp(z_i), k = z_loss
    dz_i  = m_i ((1 + 2 k l_i) p_i - onehot(y_i))         (softcap c: z = c tanh(u / c), du = dz (1 - (z / c)^2))
    dh_i  = W^T dz_i                                       dW = sum_i dz_i h_i^T

Since the loss is a plain sum, the backward only multiplies what the forward wrote by the incoming scalar. Tokens
with a weight are moved to the front first, so chunks without any cost nothing: with loss on responses only that is
often most of the head's work. Logits of one chunk at a time exist, in float32.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from fastjax.kernels.linear_cross_entropy.pallas_triton import losses_and_gradient_pallas


@dataclass(frozen=True)
class Options:
    """What does not change with the numbers; the fields are those of `linear_cross_entropy`.

    implementation: of the step from logits to gradient: "pallas_triton" or "xla".
    """

    train_weight: bool
    softcap: float | None
    z_loss: float
    chunk_size: int
    vocab_axis: str | None
    implementation: str
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear_cross_entropy_chunked(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    loss_weights: jax.Array,
    options: Options,
) -> jax.Array:
    """See `fastjax.kernels.linear_cross_entropy.linear_cross_entropy`."""
    return _loop(hidden, weight, targets, loss_weights, False, options)[0]


def _forward(hidden, weight, targets, loss_weights, options):
    loss, dhidden, dweight = _loop(hidden, weight, targets, loss_weights, True, options)
    # An empty array of weight's dtype: the backward has to return dW in it, and must not keep W alive for that.
    return loss, (dhidden, dweight, jnp.zeros((0,), weight.dtype), jnp.zeros((0,), hidden.dtype))


def _backward(options, residuals, dloss):
    dhidden, dweight, weight_like, hidden_like = residuals
    dweight = (dweight * dloss).astype(weight_like.dtype) if options.train_weight else None
    return (dhidden * dloss).astype(hidden_like.dtype), dweight, None, None


linear_cross_entropy_chunked.defvjp(_forward, _backward)


def losses_and_gradient(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, dtype: jnp.dtype | None, options: Options
) -> tuple[jax.Array, jax.Array | None]:
    """The loss of each row, and the gradient of their weighted sum.

    Args:
      logits: [C, V] float32, before the cap.  targets: [C] int in [0, V).  weights: [C] float32.
      dtype: of the gradient; None means that none is needed.
    Returns: [C] float32, not weighted; [C, V].
    """
    if dtype is not None and options.implementation == "pallas_triton":
        return losses_and_gradient_pallas(
            logits,
            targets,
            weights,
            dtype,
            softcap=options.softcap,
            z_loss=options.z_loss,
            interpret=options.interpret,
        )
    softcap = options.softcap
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    one_hot = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    if options.vocab_axis is not None:
        maximum = jax.lax.pmax(maximum, options.vocab_axis)
    exponentials = jnp.exp(logits - maximum)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if options.vocab_axis is None:
        target_logits = jnp.take_along_axis(logits, targets[:, None], axis=-1)
    else:
        target_logits = jnp.sum(jnp.where(one_hot, logits, 0), axis=-1, keepdims=True)
        total, target_logits = jax.lax.psum((total, target_logits), options.vocab_axis)
    log_sum = jnp.log(total) + maximum
    losses = (log_sum - target_logits + options.z_loss * jnp.square(log_sum))[:, 0]
    if dtype is None:
        return losses, None
    dlogits = exponentials / total
    if options.z_loss:
        dlogits = dlogits * (1.0 + 2.0 * options.z_loss * log_sum)
    dlogits = (dlogits - one_hot) * weights[:, None]
    if softcap is not None:
        dlogits = dlogits * (1.0 - jnp.square(logits / softcap))
    return losses, dlogits.astype(dtype)


def _loop(hidden, weight, targets, loss_weights, with_gradient, options):
    num_tokens, width = hidden.shape
    chunk_size, train_weight = options.chunk_size, options.train_weight
    active = loss_weights > 0
    if options.vocab_axis is not None:
        # Indices among this rank's rows of the head; another's are below 0 or behind the end, and match nothing.
        targets = targets - jax.lax.axis_index(options.vocab_axis) * weight.shape[0]
    order = jnp.argsort(jnp.logical_not(active), stable=True)
    padding = -num_tokens % chunk_size
    # Rows of the padding point behind the end: read as zeros, dropped when written.
    order = jnp.concatenate([order, jnp.full((padding,), num_tokens, order.dtype)])
    num_chunks = (jnp.sum(active) + chunk_size - 1) // chunk_size
    precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None

    def chunk(state):
        index, loss, dhidden, dweight = state
        rows = jax.lax.dynamic_slice(order, (index * chunk_size,), (chunk_size,))
        rows_hidden = hidden.at[rows].get(mode="fill", fill_value=0)
        rows_targets = targets.at[rows].get(mode="fill", fill_value=0)
        rows_weights = loss_weights.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32)
        # Inactive rows that share the last chunk may hold anything, NaN included, and must not touch the sums.
        rows_hidden = jnp.where(rows_weights[:, None] > 0, rows_hidden, 0)
        logits = jax.lax.dot_general(
            rows_hidden,
            weight,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        losses, dlogits = losses_and_gradient(
            logits, rows_targets, rows_weights, hidden.dtype if with_gradient else None, options
        )
        loss = loss + jnp.sum(losses * rows_weights)
        if dlogits is not None:
            rows_dhidden = jax.lax.dot_general(
                dlogits, weight, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            dhidden = dhidden.at[rows].set(rows_dhidden.astype(dhidden.dtype), mode="drop", unique_indices=True)
            if train_weight:
                dweight = dweight + jax.lax.dot_general(
                    dlogits,
                    rows_hidden,
                    (((0,), (0,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
        return index + 1, loss, dhidden, dweight

    state = (
        jnp.zeros((), num_chunks.dtype),
        jnp.zeros((), jnp.float32),
        # dhidden is kept in hidden's dtype: as large as one activation, and what the layers below will read anyway.
        jnp.zeros((num_tokens, width) if with_gradient else (0, 0), hidden.dtype),
        jnp.zeros(weight.shape if train_weight else (0, 0), jnp.float32),
    )
    _, loss, dhidden, dweight = jax.lax.while_loop(lambda state: state[0] < num_chunks, chunk, state)
    return loss, dhidden, dweight

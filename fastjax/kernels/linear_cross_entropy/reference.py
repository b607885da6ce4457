"""Cross-entropy of a linear head in plain jnp, float32: the definition of right. It builds all logits."""

import jax
import jax.numpy as jnp


def linear_cross_entropy_reference(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    loss_weights: jax.Array,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> jax.Array:
    """sum_i loss_weights[i] (l_i - z_i[targets[i]] + z_loss l_i^2), z_i = weight . hidden_i, l_i = logsumexp(z_i)."""
    logits = jnp.einsum("nd,vd->nv", hidden, weight, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    losses = -jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]
    losses += z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    # where, not a product alone: a masked row may hold anything, NaN included.
    return jnp.sum(jnp.where(loss_weights > 0, losses * loss_weights, 0.0))

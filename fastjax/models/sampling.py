"""From logits to the next token: temperature, then top-k, then top-p, then one draw. Float32 throughout.

    s     = logits / temperature
    top-k : s_v < (k-th largest s)                          -> -inf       (scores equal to the k-th all stay)
    top-p : sum of p over v and all that rank below it <= 1 - top_p -> -inf, p = softmax of what top-k left
    token = argmax_v (s_v + Gumbel noise_v), a draw from softmax(s)

The most likely token always stays; among equal scores the lower id ranks first, so top_k=1, top_p=0 and
temperature=0 are the same greedy choice.
"""

import math

import jax
import jax.numpy as jnp

from fastjax.errors import UserError

Scalar = float | int | jax.Array


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises: UserError for a value outside its range."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature={temperature} must be a number >= 0; 0 takes the most likely token")
    if top_k is not None and (isinstance(top_k, bool) or top_k != int(top_k) or top_k < 0):
        raise UserError(f"top_k={top_k} must be a whole number >= 0; 0 or None keeps every token")
    if top_p is not None and not 0 <= top_p <= 1:
        raise UserError(f"top_p={top_p} must lie in [0, 1]; 1 or None keeps every token")


def is_greedy(temperature: float, top_k: int | None = None, top_p: float | None = None) -> bool:
    """Whether these settings leave one token to draw from: the most likely one."""
    return temperature == 0 or top_k == 1 or top_p == 0


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row, the lower id among equals: [B, V] -> [B] int32."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def filter_logits(
    logits: jax.Array, *, temperature: Scalar = 1.0, top_k: Scalar | None = None, top_p: Scalar | None = None
) -> jax.Array:
    """The scores to draw from: scaled, and -inf where top-k or top-p removed the token.

    A row's scores may be shifted by a constant, which its softmax does not see.

    Args:
      logits: [B, V] float.
      temperature: > 0.  top_k: 0 or None keeps all.  top_p: 1 or None keeps all. Numbers or traced scalars.
    Returns: [B, V] float32.
    Source: Hugging Face's warpers, in their order; top-p of Holtzman et al. 2019 (arXiv:1904.09751). Of equal scores
      at the border of top-p the lower ids stay; theirs depends on the sort.
    """
    scores = logits.astype(jnp.float32)
    # Shifted first: with a tiny temperature the quotient would overflow and inf - inf is NaN.
    scores = (scores - jnp.max(scores, axis=-1, keepdims=True)) / temperature
    if top_k is None and top_p is None:
        return scores
    vocab_size = scores.shape[-1]
    order = jnp.argsort(scores, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(scores, order, axis=-1)
    keep = jnp.ones(ranked.shape, bool)
    if top_k is not None:
        last = jnp.where(jnp.asarray(top_k) <= 0, vocab_size, jnp.minimum(top_k, vocab_size)) - 1
        keep &= ranked >= jax.lax.dynamic_index_in_dim(ranked, last, axis=-1)
    if top_p is not None:
        probabilities = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
        # Summed from the least likely token up: small numbers first, and equality at the border is exact.
        tail = jnp.cumsum(probabilities[:, ::-1], axis=-1)[:, ::-1]
        keep &= (tail > 1.0 - top_p) | (jnp.asarray(top_p) >= 1.0)
    keep = keep.at[:, 0].set(True)
    rows = jnp.arange(scores.shape[0])[:, None]
    return jnp.where(jnp.zeros_like(keep).at[rows, order].set(keep), scores, -jnp.inf)


def row_rngs(rng: jax.Array, positions: jax.Array) -> jax.Array:
    """One key a row, from the position [B] that its next token takes: independent of where the row sits in a batch."""
    return jax.vmap(lambda position: jax.random.fold_in(rng, position))(positions)


def sample(
    logits: jax.Array,
    rngs: jax.Array,
    *,
    temperature: Scalar = 1.0,
    top_k: Scalar | None = None,
    top_p: Scalar | None = None,
) -> jax.Array:
    """One token a row, drawn from softmax(filter_logits(...)).

    Args:
      logits: [B, V] float.
      rngs: [B] keys, see `row_rngs`.
      temperature, top_k, top_p: numbers or traced scalars; a number that leaves one token to draw from (temperature
        0 too) takes the greedy choice, a traced temperature must be > 0.
    Returns: [B] int32.
    Raises: UserError for a number outside its range.
    """
    numbers = [None if isinstance(value, jax.Array) else value for value in (temperature, top_k, top_p)]
    check_sampling(1.0 if numbers[0] is None else numbers[0], *numbers[1:])  # type: ignore[arg-type]
    if is_greedy(*numbers):  # type: ignore[arg-type]
        return greedy(logits)
    scores = filter_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    noise = jax.vmap(lambda rng: jax.random.gumbel(rng, scores.shape[1:], jnp.float32))(rngs)
    return jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)

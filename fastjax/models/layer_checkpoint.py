"""How the backward of a decoder layer keeps less: what a policy says, and an MLP in pieces of its rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fastjax.models.remat import Policy


def checkpoint_layer(
    layer: Callable, policy: Policy, *, unrolled: bool = False, keep_gathered: bool = True
) -> Callable:
    """`layer`, a function of the scan's carry and inputs, with what the policy says kept for its backward.

    Args:
      unrolled: whether the scan is unrolled. Every layer is then compiled by itself, and what it keeps is read where it
        lies: the compiler sees through the stack of values made apart and taken apart again.
      keep_gathered: False has the backward gather weights again instead of keeping those of every layer.
    """
    if unrolled:
        # A function of its own is lowered once for all the layers that call it.
        return jax.jit(_checkpoint(layer, policy, keep_gathered, prevent_cse=True))
    # Inside a loop the compiler cannot merge the recomputation with the forward, so its guard is not needed.
    return _checkpoint(layer, policy, keep_gathered, prevent_cse=False)


def _checkpoint(layer: Callable, policy: Policy, keep_gathered: bool, *, prevent_cse: bool) -> Callable:
    if policy.all and keep_gathered:
        return layer
    if policy.all:
        return jax.checkpoint(layer, policy=_all_but_gathered, prevent_cse=prevent_cse)
    if policy.offloaded:
        saveable = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(policy.saved),
            names_which_can_be_offloaded=list(policy.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saveable = jax.checkpoint_policies.save_only_these_names(*policy.saved)
    return jax.checkpoint(layer, policy=saveable, prevent_cse=prevent_cse)


def in_pieces(function: Callable[[jax.Array], jax.Array], x: jax.Array, num_tokens: int) -> jax.Array:
    """`function`, which takes every token by itself, of a few tokens of each row after the other.

    The backward of a piece computes the piece again, so only one piece's values are ever there.

    Args:
      x: [B, T, D].
      num_tokens: of all B rows together, in a piece at most (one of each row at least).
    Returns: [B, T, D].
    """
    rows, length, width = x.shape
    count = -(-length // max(1, num_tokens // rows))
    if count <= 1:
        return function(x)
    size = -(-length // count)
    padded = jnp.pad(x, ((0, 0), (0, count * size - length), (0, 0)))
    pieces = jnp.swapaxes(padded.reshape(rows, count, size, width), 0, 1)
    done = jax.lax.map(jax.checkpoint(function, prevent_cse=False), pieces)
    return jnp.swapaxes(done, 0, 1).reshape(padded.shape)[:, :length]


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    # A float weight is gathered inside a custom_vjp, which stays one step of the program.
    inside = getattr(params.get("call_jaxpr"), "eqns", ())
    return "all_gather" not in (primitive.name, *(step.primitive.name for step in inside))

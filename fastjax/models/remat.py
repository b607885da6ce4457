"""What the backward pass keeps of a decoder layer, by name.

The decoder names its activations with `jax.ad_checkpoint.checkpoint_name`; a policy is the set of names that is
saved, and the rest is recomputed. "none" saves whatever the backward reads and recomputes nothing.
"""

from collections.abc import Callable

import jax

from fastjax.errors import UserError

_LAYER_INPUT = ("layer_in",)
_ATTENTION = (*_LAYER_INPUT, "query", "key", "value", "attn_out")
_NO_MATMUL = (*_ATTENTION, "mid", "gate", "up")

POLICIES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "full": _LAYER_INPUT,
    "attention": _ATTENTION,
    "no_matmul": _NO_MATMUL,
}


def check_policy(remat: str) -> None:
    """Raises: UserError unless `remat` names a policy."""
    if remat not in POLICIES:
        raise UserError(f"remat={remat!r} is not a policy; known: {', '.join(POLICIES)}")


def checkpoint_layer(layer: Callable, remat: str) -> Callable:
    """`layer` (a function of the scan's carry and inputs) with the named rematerialisation policy.

    Args:
      remat: "none" (nothing recomputed), "full" (only the layer's input is kept), "attention" (also q, k, v after
        RoPE and the attention output), "no_matmul" (also the middle residual, gate and up: no matmul of the frozen
        model is computed twice).
    Raises: UserError for another name.
    """
    check_policy(remat)
    names = POLICIES[remat]
    if names is None:
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    # Inside a scan the compiler cannot merge the recomputation with the forward, so its guard is not needed.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)

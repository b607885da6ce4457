"""A decoder layer whose backward keeps what a policy says."""

from collections.abc import Callable

import jax

from fastjax.models.remat import Policy


def checkpoint_layer(layer: Callable, policy: Policy) -> Callable:
    """`layer`, a function of the scan's carry and inputs, with what the policy says kept for its backward."""
    if policy.all:
        return layer
    if policy.offloaded:
        saveable = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(policy.saved),
            names_which_can_be_offloaded=list(policy.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saveable = jax.checkpoint_policies.save_only_these_names(*policy.saved)
    # Inside a scan the compiler cannot merge the recomputation with the forward, so its guard is not needed.
    return jax.checkpoint(layer, policy=saveable, prevent_cse=False)

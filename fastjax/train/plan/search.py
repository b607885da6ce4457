"""The plan that recomputes least within a number of bytes.

Plans are ordered from lean to rich: the layers' inputs in host memory, then on the device, run by run, or in long rows
first the attention's output; then both, then everything that spares a matmul, and at last a pass over memory.
"""

from dataclasses import replace

from fastjax.models.config import ModelConfig
from fastjax.models.remat import POLICIES, Policy, RematPlan
from fastjax.train.plan.costs import Workload, kept_bytes, layer_costs, planned_bytes

_WITH_ATTENTION = Policy(("layer_in", "attn_out", "attn_lse"))
_HOST_AND_ATTENTION = Policy(("attn_out", "attn_lse"), ("layer_in",))
_HALF = Policy((*POLICIES["attention"].saved, "mid"))
# A byte's way to host memory and back takes as long as so many FLOP: 1.5 ms for 64 MiB on an H200 at 687 TFLOP/s.
_FLOP_PER_HOST_BYTE = 15_000
# Unrolled layers save two copies of what is kept; below this the longer compilation is not worth it.
_WORTH_UNROLLING = 4 * 2**30


def ladder(config: ModelConfig, work: Workload) -> list[RematPlan]:
    """Every plan that is considered, leanest first; each keeps more than the one before.

    Rich layers come first: their activations are given back last.
    """
    num_layers = config.num_hidden_layers
    costs = layer_costs(config, work)
    is_long = costs.flop["attn_out"] > _FLOP_PER_HOST_BYTE * costs.num_bytes["layer_in"]
    first = _HOST_AND_ATTENTION if is_long else POLICIES["full"]
    steps = [POLICIES["offload"], first, _WITH_ATTENTION, _HALF, POLICIES["no_matmul"]]
    plans: list[RematPlan] = []
    for lean, rich in zip(steps[:3], (steps[1], steps[2], steps[4]), strict=True):
        for count in range(num_layers + 1):
            plans.append(_plan(count, rich, lean, num_layers))
            if rich == steps[4] and count < num_layers:
                plans.append(_plan(count, rich, lean, num_layers, between=_HALF))
    # Weights that are trained in full would be copied out of their stacks, and their gradients into others.
    if work.adapter_width and kept_bytes(plans[-1], config, work) >= _WORTH_UNROLLING:
        del plans[-1]
        for count in range(num_layers + 1):
            plan = _plan(count, POLICIES["most"], POLICIES["no_matmul"], num_layers)
            plans.append(replace(plan, unrolled=True))
    return list(dict.fromkeys(plans))


def richest(config: ModelConfig, work: Workload, *, budget: int, fixed: int) -> RematPlan | None:
    """The richest plan of the ladder whose own bytes and `fixed` ones are at most `budget`; None if none fits.

    Args:
      fixed: bytes of weights, states and whatever no plan changes.
    """
    best = None
    for plan in ladder(config, work):
        if fixed + planned_bytes(plan, config, work) <= budget:
            best = plan
    return best


def _plan(count: int, rich: Policy, lean: Policy, num_layers: int, between: Policy | None = None) -> RematPlan:
    groups = [(count, rich), (0 if between is None else 1, between), (num_layers - count - (between is not None), lean)]
    return RematPlan(tuple((number, policy) for number, policy in groups if number > 0 and policy is not None))

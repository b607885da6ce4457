"""The plan that recomputes least within a number of bytes.

Plans are ordered from lean to rich: the layers' inputs in host memory, then on the device, run by run; then the layers
get the attention's output, then everything that spares a matmul.
"""

from fastjax.models.config import ModelConfig
from fastjax.models.remat import POLICIES, Policy, RematPlan
from fastjax.train.plan.costs import Workload, planned_bytes

_WITH_ATTENTION = Policy(("layer_in", "attn_out", "attn_lse"))
_HALF = Policy((*POLICIES["attention"].saved, "mid"))


def ladder(num_layers: int) -> list[RematPlan]:
    """Every plan that is considered, leanest first; each keeps more than the one before.

    Rich layers come first: their activations are given back last.
    """
    steps = [POLICIES["offload"], POLICIES["full"], _WITH_ATTENTION, _HALF, POLICIES["no_matmul"]]
    plans: list[RematPlan] = []
    for lean, rich in zip(steps[:3], (steps[1], steps[2], steps[4]), strict=True):
        for count in range(num_layers + 1):
            plans.append(_plan(count, rich, lean, num_layers))
            if rich == steps[4] and count < num_layers:
                plans.append(_plan(count, rich, lean, num_layers, between=_HALF))
    return list(dict.fromkeys(plans))


def richest(config: ModelConfig, work: Workload, *, budget: int, fixed: int) -> RematPlan | None:
    """The richest plan of the ladder whose own bytes and `fixed` ones are at most `budget`; None if none fits.

    Args:
      fixed: bytes of weights, states and whatever no plan changes.
    """
    best = None
    for plan in ladder(config.num_hidden_layers):
        if fixed + planned_bytes(plan, config, work) <= budget:
            best = plan
    return best


def _plan(count: int, rich: Policy, lean: Policy, num_layers: int, between: Policy | None = None) -> RematPlan:
    groups = [(count, rich), (0 if between is None else 1, between), (num_layers - count - (between is not None), lean)]
    return RematPlan(tuple((number, policy) for number, policy in groups if number > 0 and policy is not None))

"""What the backward pass keeps of each decoder layer, by name.

The decoder names its activations with `jax.ad_checkpoint.checkpoint_name`. A policy is a set of names to keep on the
device and a set to keep in host memory; the rest is recomputed. A plan gives each run of layers its policy, so that
memory can be filled to the last layer. This module imports no jax: settings are checked before it is loaded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fastjax.errors import UserError

# Not a plan: the run finds one that fits its memory.
AUTO = "auto"
# In the order in which a layer makes them.
NAMES = (
    "layer_in", "attn_in", "query", "key", "value", "attn_out", "attn_lse", "mid", "mlp_in", "gate_up", "inner",
    "lora_xa",
)  # fmt: skip
# A plan's first word where its layers are compiled one by one instead of as one loop.
_UNROLLED = "unrolled"
_GROUP = re.compile(r"(?:(?P<count>\d{1,6})\s*\*\s*)?(?P<policy>[a-z_+:]+)")


@dataclass(frozen=True)
class Policy:
    """Names that are kept on the device, and in host memory; `all` keeps whatever the backward reads."""

    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    all: bool = False

    def keeps(self, name: str) -> bool:
        """Whether an activation is kept, wherever."""
        return self.all or name in self.saved or name in self.offloaded

    def __str__(self) -> str:
        if self.all:
            return "none"
        known = next((name for name, policy in POLICIES.items() if policy == self), None)
        return known or "+".join([*self.saved, *(f"host:{name}" for name in self.offloaded)])


# lora_xa is the adapters' x A, a thousandth of the rest, which costs a pass over x to make again.
_ATTENTION = ("layer_in", "query", "key", "value", "attn_out", "attn_lse", "lora_xa")
POLICIES: dict[str, Policy] = {
    "none": Policy(all=True),
    "full": Policy(("layer_in",)),
    "attention": Policy(_ATTENTION),
    "no_matmul": Policy((*_ATTENTION, "mid", "gate_up")),
    "most": Policy((*_ATTENTION, "attn_in", "mid", "mlp_in", "gate_up", "inner")),
    "offload": Policy((), ("layer_in",)),
}


@dataclass(frozen=True)
class RematPlan:
    """What the backward keeps of every layer, and how the layers are compiled.

    Attributes:
      groups: policies of runs of layers, first to last: (number of layers, policy); 0 means all that are left.
      unrolled: one after the other instead of as one loop. What is kept then stays where it was made, where a loop
        copies it into a stack and out again; compiling takes longer, and grows with the number of layers.
    """

    groups: tuple[tuple[int, Policy], ...]
    unrolled: bool = False

    def __str__(self) -> str:
        groups = (str(policy) if count == 0 else f"{count}*{policy}" for count, policy in self.groups)
        return ",".join([*([_UNROLLED] if self.unrolled else []), *groups])

    @property
    def offloads(self) -> bool:
        """Whether any layer keeps something in host memory."""
        return any(policy.offloaded for _, policy in self.groups)

    def of_layers(self, num_layers: int) -> Iterator[tuple[int, int, Policy]]:
        """(first layer, number of layers, policy) of each run.

        Raises: UserError if the plan is for another number of layers.
        """
        first = 0
        for count, policy in self.groups:
            count = count or num_layers - first
            if count > 0:
                yield first, count, policy
            first += count
        if first != num_layers:
            raise UserError(f"remat={str(self)!r} is for {first} layers, and the model has {num_layers}")


def parse_plan(text: str) -> RematPlan:
    """A plan from its text: `full`; `12*no_matmul,full`; `layer_in+mid,host:layer_in`; `unrolled,no_matmul`.

    A policy is one of POLICIES, or names of activations joined by +, `host:` before those that go to host memory. The
    last run takes the layers that are left. `unrolled` stands first.
    Raises: UserError for another text.
    """
    groups: list[tuple[int, Policy]] = []
    parts = text.split(",")
    unrolled = parts[0].strip() == _UNROLLED
    if unrolled and len(parts) > 1:
        del parts[0]
    for index, part in enumerate(parts):
        found = _GROUP.fullmatch(part.strip())
        if not found or (found["count"] is None and index < len(parts) - 1):
            raise UserError(f"remat={text!r} is not understood at {part!r}; {_help()}")
        groups.append((int(found["count"] or 0), _policy(found["policy"], text)))
    plan = RematPlan(tuple(groups), unrolled)
    if unrolled and plan.offloads:
        # The compiler drops the transfers there, and keeps everything on the device.
        raise UserError(f"remat={text!r}: layers that are {_UNROLLED} keep nothing in host memory; leave that word out")
    return plan


def _policy(text: str, whole: str) -> Policy:
    if text in POLICIES:
        return POLICIES[text]
    saved: list[str] = []
    offloaded: list[str] = []
    for word in text.split("+"):
        name = word.removeprefix("host:")
        if name not in NAMES:
            raise UserError(f"remat={whole!r}: {word!r} is neither a policy nor an activation; {_help()}")
        (offloaded if word != name else saved).append(name)
    return Policy(tuple(saved), tuple(offloaded))


def _help() -> str:
    return (
        f"policies: {', '.join(POLICIES)}; activations: {', '.join(NAMES)}; 12*no_matmul,full splits the layers; "
        f"{_UNROLLED},no_matmul compiles them one by one"
    )

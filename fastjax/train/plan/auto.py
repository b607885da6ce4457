"""`remat=auto` of a run: the plan for the device that is there, and the step that was compiled for it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fastjax.hosts.exchange import num_processes, smallest
from fastjax.models.config import ModelConfig
from fastjax.models.remat import RematPlan, parse_plan
from fastjax.train.plan.choose import Choice, choose_plan
from fastjax.train.plan.costs import Workload, adapter_width
from fastjax.train.plan.memory import num_bytes
from fastjax.train.plan.remembered import plan_file, recall, remember

Batch = dict[str, jax.Array]


class PlannedStep:
    """A jitted training step; batches of the shape that the plan was made for run what is compiled already.

    Attributes:
      choice: what was found for the memory there is; None where nothing limits it.
    """

    def __init__(self, step: Callable, choice: Choice | None, batch: dict[str, Any] | None) -> None:
        self._step = step
        self.choice = choice
        self._compiled = None if choice is None else choice.compiled
        self._shape = None if batch is None else batch["input_ids"].shape

    def __call__(self, trainable: Any, opt_state: Any, frozen: Any, batch: Batch, rng: jax.Array) -> Any:
        if self._compiled is not None and batch["input_ids"].shape == self._shape:
            return self._compiled(trainable, opt_state, frozen, batch, rng)
        return self._step(trainable, opt_state, frozen, batch, rng)


def device_budget(device: jax.Device, in_use: int) -> int | None:
    """Bytes that a step may have on a device, its arguments included; None for a device without a limit, a CPU.

    Args:
      in_use: bytes of the step's arguments, which lie there already.
    """
    stats = device.memory_stats() if device.platform in ("gpu", "cuda") else None
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"] - max(0, stats["bytes_in_use"] - in_use))


def auto_step(
    make_step: Callable[[RematPlan], Any],
    arguments: tuple[Any, Any, Any],
    batch: dict[str, Any],
    rng: jax.Array,
    *,
    config: ModelConfig,
    itemsize: int,
    num_shards: int,
    budget_gib: float | None,
    say: Callable[[str], None],
    ways: Sequence[str] = (),
    search_anew: bool = False,
) -> PlannedStep:
    """The training step under the plan that recomputes least within the memory there is.

    Without a limit, on a CPU, everything is kept.

    Args:
      make_step: plan -> the jitted step.
      arguments: (trainable, opt_state, frozen), on the devices.
      batch: the widest batch, [A, B, T], abstract.
      num_shards: data-parallel ranks that share B.
      budget_gib: GiB for each device; None takes what the allocator has.
      ways: settings that take less memory, for the message where nothing fits.
      search_anew: whether a plan that an earlier run found is passed over.
    Raises: DeviceMemoryError if nothing fits.
    """
    held = num_bytes(arguments, per_device=True)
    device = next(iter(jax.tree.leaves(arguments)[0].sharding.addressable_devices))
    # All processes must run the same program.
    budget = smallest(device_budget(device, held)) if budget_gib is None else int(budget_gib * 2**30)
    if budget is None:
        return PlannedStep(make_step(parse_plan("none")), None, None)
    steps: dict[RematPlan, Any] = {}

    def compile_step(plan: RematPlan) -> Any:
        steps[plan] = make_step(plan)
        return steps[plan].lower(*arguments, batch, rng).compile()

    _, rows, seq = batch["input_ids"].shape
    work = Workload(seq, rows * seq // num_shards, itemsize, adapter_width(arguments[0]))
    shapes = {name: [*leaf.shape, str(leaf.dtype)] for name, leaf in batch.items()}
    mesh = {axis: size for leaf in batch.values() for axis, size in leaf.sharding.mesh.shape.items()}
    file = plan_file(config, work, gpu=device.device_kind, budget=budget, arguments=held, batch=shapes, mesh=mesh)
    # Of several processes each could remember another plan, and all must compile the same ones.
    known = None if search_anew or num_processes() > 1 else recall(file, config.num_hidden_layers, say)
    choice = choose_plan(config, work, budget=budget, arguments=held, compile_step=compile_step, ways=ways, known=known)
    remember(file, choice.plan, choice.memory.peak)
    say(f"memory   {choice}")
    return PlannedStep(steps[choice.plan], choice, batch)

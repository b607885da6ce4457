"""The rematerialisation plan that a run gets: the cost model proposes, the compiler confirms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastjax.errors import DeviceMemoryError
from fastjax.models.config import ModelConfig
from fastjax.models.remat import POLICIES, RematPlan
from fastjax.train.plan.costs import Workload, kept_bytes, planned_bytes, recomputed_flop, step_flop
from fastjax.train.plan.memory import StepMemory, read_memory
from fastjax.train.plan.search import ladder, richest

_GIB = 2**30
_ROW_STEP = 128
# Compilations of one choice; the second nearly always decides.
_MOST_TRIES = 5
# The allocator cannot use every byte: arrays of many sizes leave holes.
_USABLE_SHARE = 0.985
# Peaks of one plan that differ by less are the same.
_SAME = 0.005
# Of a token's width, that the backward of an attention holds at once.
_ATTENTION_ARRAYS = 13
# A plan that would keep less than this share more is not worth another compilation.
_WORTH_A_TRY = 0.03


@dataclass(frozen=True)
class Choice:
    """A plan, what its step needs, and the compiled step."""

    plan: RematPlan
    memory: StepMemory
    recomputed: float
    compiled: Any

    def __str__(self) -> str:
        host = f", {self.memory.host / _GIB:.1f} GiB of host memory" if self.memory.host else ""
        return (
            f"remat={self.plan}: peak {self.memory.peak / _GIB:.2f} GiB{host}, {self.recomputed:.0%} of the FLOP are "
            "computed twice"
        )


def usable(budget: int) -> int:
    """Of a budget's bytes, those that a step's arrays can fill."""
    return int(budget * _USABLE_SHARE)


def workspace_guess(config: ModelConfig, work: Workload) -> int:
    """Bytes that a step makes and drops whatever its plan: the backward of one attention, and decoded weights."""
    weights = 2 * 2 * config.hidden_size * config.intermediate_size * work.itemsize
    return _ATTENTION_ARRAYS * work.num_tokens * config.hidden_size * work.itemsize + weights


def choose_plan(
    config: ModelConfig,
    work: Workload,
    *,
    budget: int,
    arguments: int,
    compile_step: Callable[[RematPlan], Any],
    known: tuple[RematPlan, int] | None = None,
    ways: Sequence[str] = (),
    read: Callable[[Any], StepMemory] = read_memory,
) -> Choice:
    """The plan that recomputes least and whose compiled step fits.

    Args:
      budget: bytes that the run may have on each device.
      arguments: bytes of weights, adapters and states on each device.
      compile_step: a plan -> jax's compiled step.
      known: the plan that an earlier search found, and its peak; if the compiler says the same again, it is taken.
      read: what a compiled step needs.
      ways: settings that take less memory, for the message where nothing fits.
    Raises: DeviceMemoryError if the leanest plan does not fit, saying by how much, and what would.
    """
    limit = usable(budget)
    fixed = arguments + workspace_guess(config, work)
    leanest = ladder(config, work)[0]
    tried: dict[RematPlan, Choice] = {}
    best: Choice | None = None
    for number in range(_MOST_TRIES):
        plan = richest(config, work, budget=limit, fixed=fixed) or leanest
        if number == 0 and known is not None:
            plan = known[0]
        if plan in tried:
            break
        compiled = compile_step(plan)
        memory = read(compiled)
        share = recomputed_flop(plan, config, work) / step_flop(config, work.seq)
        choice = tried[plan] = Choice(plan, memory, share, compiled)
        fits = memory.peak <= limit
        if fits and (best is None or kept_bytes(plan, config, work) > kept_bytes(best.plan, config, work)):
            best = choice
        if not fits and plan == leanest:
            break
        if fits and number == 0 and known is not None and abs(memory.peak - known[1]) <= _SAME * known[1]:
            break
        # The step itself tells what it needs beside what is kept.
        fixed = memory.peak - planned_bytes(plan, config, work)
        better = richest(config, work, budget=limit, fixed=fixed)
        gain = 0 if better is None else kept_bytes(better, config, work) - kept_bytes(plan, config, work)
        if fits and gain < _WORTH_A_TRY * kept_bytes(_all(config), config, work):
            break
    if best is None:
        least = min((choice.memory for choice in tried.values()), key=lambda memory: memory.peak)
        raise DeviceMemoryError(_too_small(least, budget, work, ways))
    return best


def _all(config: ModelConfig) -> RematPlan:
    return RematPlan(((config.num_hidden_layers, POLICIES["no_matmul"]),))


def _too_small(memory: StepMemory, budget: int, work: Workload, ways: Sequence[str]) -> str:
    over = memory.peak - usable(budget)
    # What grows with the tokens of a micro-batch is the workspace; arguments do not.
    room = usable(budget) - memory.arguments - memory.outputs
    fitting = int(work.num_tokens * room / memory.workspace) if memory.workspace else 0
    message = (
        f"a step of {work.num_tokens:,} tokens needs {memory.peak / _GIB:.2f} GiB, {over / _GIB:.2f} more than the "
        f"budget of {budget / _GIB:.2f} allows, even with the layers' inputs in host memory. "
    )
    if fitting < _ROW_STEP:
        message += (
            f"Weights and states alone take {memory.arguments / _GIB:.2f} GiB: use more memory or a smaller model"
        )
    else:
        rows = fitting // work.seq
        shorter = f"max_seq_length={min(fitting, work.seq * fitting // work.num_tokens) // _ROW_STEP * _ROW_STEP}"
        smaller = f"per_device_train_batch_size={rows}, or {shorter}" if rows else shorter
        message += f"About {fitting:,} tokens fit: use {smaller}"
    return message + "".join(f"\nor {way}" for way in ways)

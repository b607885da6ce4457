"""The rematerialisation plan that a run gets: the cost model proposes, the compiler confirms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastjax.errors import DeviceMemoryError
from fastjax.models.config import ModelConfig
from fastjax.models.remat import POLICIES, RematPlan
from fastjax.train.plan.costs import kept_bytes, recomputed_flop, step_flop
from fastjax.train.plan.memory import StepMemory, read_memory
from fastjax.train.plan.search import ladder, richest

_GIB = 2**30
# Compilations of one choice; the second nearly always decides.
_MOST_TRIES = 5
# The allocator cannot use every byte: arrays of many sizes leave holes.
_USABLE = 0.985
# A plan that would keep less than this share more is not worth another compilation.
_WORTH_A_TRY = 0.03


@dataclass(frozen=True)
class Workload:
    """What a plan depends on beside the model: one micro-batch on one device.

    Attributes:
      seq: tokens of a row, padding included.  num_tokens: of all rows of the micro-batch.
      itemsize: bytes of an activation's element.  rank: of the adapters; 0 without.
    """

    seq: int
    num_tokens: int
    itemsize: int = 2
    rank: int = 16


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


def workspace_guess(config: ModelConfig, work: Workload) -> int:
    """Bytes that a step makes and drops beside what is kept: the backward of one MLP, and decoded weights."""
    inner = config.intermediate_size * work.itemsize
    weights = 2 * 2 * config.hidden_size * inner
    return 7 * work.num_tokens * inner + weights + 4 * work.num_tokens * config.hidden_size * work.itemsize


def choose_plan(
    config: ModelConfig, work: Workload, *, budget: int, arguments: int, compile_step: Callable[[RematPlan], Any]
) -> Choice:
    """The plan that recomputes least and whose compiled step fits.

    Args:
      budget: bytes that the run may have on each device.
      arguments: bytes of weights, adapters and states on each device.
      compile_step: a plan -> jax's compiled step.
    Raises: DeviceMemoryError if the leanest plan does not fit, saying by how much, and what would.
    """
    usable = int(budget * _USABLE)
    fixed = arguments + workspace_guess(config, work)
    leanest = ladder(config.num_hidden_layers)[0]
    tried: dict[RematPlan, Choice] = {}
    best: Choice | None = None
    for _ in range(_MOST_TRIES):
        plan = _richest(config, work, usable, fixed) or leanest
        if plan in tried:
            break
        compiled = compile_step(plan)
        memory = read_memory(compiled)
        share = recomputed_flop(plan, config, work.seq) / step_flop(config, work.seq)
        choice = tried[plan] = Choice(plan, memory, share, compiled)
        fits = memory.peak <= usable
        if fits and (best is None or _kept(plan, config, work) > _kept(best.plan, config, work)):
            best = choice
        if not fits and plan == leanest:
            break
        # The step itself tells what it needs beside what is kept.
        fixed = memory.peak - _kept(plan, config, work)
        better = _richest(config, work, usable, fixed)
        gain = 0 if better is None else _kept(better, config, work) - _kept(plan, config, work)
        if fits and gain < _WORTH_A_TRY * _kept(_all(config), config, work):
            break
    if best is None:
        raise DeviceMemoryError(
            _too_small(min(tried.values(), key=lambda c: c.memory.peak).memory, budget, config, work)
        )
    return best


def _richest(config: ModelConfig, work: Workload, budget: int, fixed: int) -> RematPlan | None:
    return richest(config, seq=work.seq, num_tokens=work.num_tokens, itemsize=work.itemsize, budget=budget, fixed=fixed)


def _kept(plan: RematPlan, config: ModelConfig, work: Workload) -> int:
    return kept_bytes(plan, config, work.seq, work.num_tokens, work.itemsize)


def _all(config: ModelConfig) -> RematPlan:
    return RematPlan(((config.num_hidden_layers, POLICIES["no_matmul"]),))


def _too_small(memory: StepMemory, budget: int, config: ModelConfig, work: Workload) -> str:
    over = memory.peak - int(budget * _USABLE)
    # What grows with the tokens of a micro-batch is the workspace; arguments do not.
    room = budget * _USABLE - memory.arguments - memory.outputs
    fitting = int(work.num_tokens * room / memory.workspace) if memory.workspace else 0
    message = (
        f"a step of {work.num_tokens:,} tokens needs {memory.peak / _GIB:.2f} GiB, {over / _GIB:.2f} more than the "
        f"budget of {budget / _GIB:.2f} allows, even with the layers' inputs in host memory. "
    )
    if fitting < 1:
        return (
            message
            + f"Weights and states alone take {memory.arguments / _GIB:.2f} GiB: use method=qlora, or more memory"
        )
    rows = fitting // work.seq
    way_out = f"per_device_train_batch_size={rows}" if rows else f"max_seq_length of about {fitting // 128 * 128}"
    return message + f"About {fitting:,} tokens fit: use {way_out}, or method=qlora where it is not in use"

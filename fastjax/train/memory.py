"""What a run that is out of device memory can do about it, and how much each way spares."""

import textwrap
from dataclasses import dataclass, replace
from typing import Any

import jax

from fastjax.errors import UserError
from fastjax.models.config import ModelConfig
from fastjax.models.remat import AUTO, RematPlan, parse_plan
from fastjax.train.config import TrainConfig
from fastjax.train.host_embedding import check_offload
from fastjax.train.plan.choose import Choice, workspace_guess
from fastjax.train.plan.costs import Workload, adapter_width, planned_bytes
from fastjax.train.plan.memory import num_bytes

_GIB = 2**30


@dataclass(frozen=True)
class Need:
    """What a run's step takes of a device's memory.

    Attributes:
      model, work: the model, and a micro-batch on one device.
      states: bytes of the optimiser; 0 where that is not known.
    """

    model: ModelConfig
    work: Workload
    states: int

    @classmethod
    def of(
        cls, config: TrainConfig, model: ModelConfig, trainable: Any, optimizer: Any, itemsize: int,
        num_devices: int = 1,
    ) -> "Need":  # fmt: skip
        """Of a run's settings; `trainable` may be abstract."""
        rows, seq = config.per_device_train_batch_size, config.max_seq_length
        work = Workload(seq, rows * seq, itemsize, adapter_width(trainable))
        # Of several devices each may hold a part.
        states = num_bytes(jax.eval_shape(optimizer.init, trainable)) if num_devices == 1 else 0
        return cls(model, work, states)

    def of_step(self, plan: RematPlan) -> int:
        """Bytes that grow with the tokens, kept activations and workspace, by the cost model."""
        # "none" keeps more than what has names.
        keeps_all = any(policy.all for _, policy in plan.groups)
        named = parse_plan("no_matmul") if keeps_all else plan
        return planned_bytes(named, self.model, self.work) + workspace_guess(self.model, self.work)


def out_of_memory(error: BaseException, config: TrainConfig, need: Need | None, choice: Choice | None) -> str:
    """XLA's complaint in a line, and under it the settings of this run that would take less, the cheapest first."""
    first = textwrap.shorten(str(error).strip().splitlines()[0], 200)
    planned = "" if choice is None else f"\nby the compiler's count this step fits: {choice}"
    return f"out of device memory: {first}{planned}\n{'; '.join(remedies(config, need, choice))}"


def remedies(config: TrainConfig, need: Need | None = None, choice: Choice | None = None) -> list[str]:
    """Changes of the settings that take less device memory, those first that change neither speed nor result much.

    Args:
      need: what the step takes, to say how much less; None says no numbers.
      choice: the plan that remat=auto found.
    """
    found = []
    step = 0
    if need is not None:
        plan = parse_plan("no_matmul" if config.remat == AUTO else config.remat)
        step = need.of_step(plan) if choice is None else choice.memory.workspace
    if choice is not None:
        less = f"--memory_budget_gib {0.95 * choice.memory.peak / _GIB:.1f}"
        found.append(f"leave the device some room: {less} (the plan's peak is {choice.memory.peak / _GIB:.2f} GiB)")
    elif config.remat != "offload":
        leaner = "offload" if config.remat == "full" else "full or offload"
        spared = "" if need is None else _less(step - need.of_step(parse_plan("offload")))
        found.append(f"use --remat {leaner} (it is {config.remat}){spared}")
    rows, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if rows > 1:
        # The same rows a step, in as many more micro-batches: the loss of a step is the same.
        divisor = next(size for size in range(2, rows + 1) if rows % size == 0)
        found.append(
            f"use --per_device_train_batch_size {rows // divisor} "
            f"--gradient_accumulation_steps {accumulation * divisor}, which is the same step"
            f"{_less(step - step // divisor)}"
        )
    found += savings(config, need)
    shorter = "" if step == 0 else f"; {config.max_seq_length // 2} takes{_less(step - step // 2)[1:]}"
    found.append(f"make --max_seq_length smaller (it is {config.max_seq_length}{shorter})")
    found.append("see what each takes beforehand with python -m fastjax.plan")
    return found


def savings(config: TrainConfig, need: Need | None = None) -> list[str]:
    """Settings that make weights and states smaller, whatever the batch."""
    found = []
    if config.method == "full":
        found.append("train adapters: --method qlora or lora")
    elif config.method == "lora":
        found.append("hold the base in 4 bit: --method qlora")
    if config.optim == "adamw":
        # Two moments of 4 bytes, against 1 byte each and a scale for 256 of them.
        spared = 0 if need is None else int(need.states * (1 - (1 + 4 / 256) / 4))
        found.append(f"keep the optimiser's moments in 8 bit: --optim adamw_8bit{_less(spared)}")
    if need is not None and not config.offload_embedding and _can_offload(config, need.model):
        table = need.model.vocab_size * need.model.hidden_size * need.work.itemsize
        found.append(f"keep the embedding in host memory: --offload_embedding{_less(table)}")
    return found


def _can_offload(config: TrainConfig, model: ModelConfig) -> bool:
    try:
        check_offload(replace(config, offload_embedding=True), model)
    except UserError:
        return False
    return True


def _less(num_bytes: int) -> str:
    return f", about {num_bytes / _GIB:.2f} GiB less" if num_bytes > 0 else ""

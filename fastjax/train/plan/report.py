"""The answer of `fastjax plan`: what a run needs of a described GPU."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from fastjax.errors import UserError
from fastjax.gpu_targets import TARGETS, target_mesh
from fastjax.models.config import ModelConfig
from fastjax.models.presets import PRESETS, preset
from fastjax.models.quant_config import QuantConfig
from fastjax.models.remat import AUTO, POLICIES, RematPlan, parse_plan
from fastjax.train.config import TrainConfig
from fastjax.train.mesh import AXES
from fastjax.train.parts import lora_settings, open_base, quantization_settings
from fastjax.train.plan.abstract import AbstractRun, abstract_batch
from fastjax.train.plan.choose import Choice, Workload, choose_plan, workspace_guess
from fastjax.train.plan.costs import kept_bytes, recomputed_flop, step_flop
from fastjax.train.plan.memory import read_memory
from fastjax.train.plan.speed import step_seconds

_GIB = 2**30
# Of a GPU's memory: what the allocator takes, the driver's and the runtime's own share left out.
_ALLOCATABLE = 0.92
_ROW_STEP = 128


@dataclass(frozen=True)
class Report:
    """What a step needs, GiB and seconds.

    Attributes:
      parts: bytes on the device: weights, trained, optimizer, activations, workspace.
      longest_row, largest_batch: with `longest`, of batch 1 and of max_seq_length; else None.
    """

    model: str
    gpu: str
    policy: str
    fits: bool
    budget: int
    peak: int
    parts: dict[str, int]
    host: int
    step_time_s: float
    tokens_per_second: float
    longest_row: int | None = None
    largest_batch: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """In a form that JSON takes; bytes as GiB."""
        gib = lambda value: round(value / _GIB, 3)  # noqa: E731
        return {
            "model": self.model, "gpu": self.gpu, "fits": self.fits, "policy": self.policy, "peak_gib": gib(self.peak),
            "budget_gib": gib(self.budget), "parts_gib": {name: gib(value) for name, value in self.parts.items()},
            "host_gib": gib(self.host), "step_time_s": round(self.step_time_s, 4),
            "tokens_per_second": round(self.tokens_per_second, 1), "longest_row": self.longest_row,
            "largest_batch": self.largest_batch,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = "\n".join(f"  {name:<12}{value / _GIB:8.2f} GiB" for name, value in self.parts.items())
        verdict = "fits" if self.fits else "does not fit"
        lines = [
            f"peak {self.peak / _GIB:.2f} GiB of {self.budget / _GIB:.2f} on {self.gpu}: {verdict}",
            parts,
            f"  {'host':<12}{self.host / _GIB:8.2f} GiB",
            f"remat={self.policy}",
            f"estimated    {self.step_time_s:.3f} s a micro-batch, {self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.longest_row is not None:
            lines.append(f"longest row  {self.longest_row:,} tokens at batch 1; largest batch {self.largest_batch}")
        return "\n".join(lines)


def make_report(config: Any, given: frozenset[str]) -> Report:
    """Compiles the step for the described GPU; no weights are read.

    Args:
      config: a `fastjax.plan.PlanConfig`.
      given: names of the settings that the user gave.
    Raises: UserError where the CUDA plugin is missing, or for a model that is not there; DeviceMemoryError if not even
      the leanest plan fits and `longest` is not asked for.
    """
    model_config, quantization, lora = _model(config, given)
    try:
        described = target_mesh(config.gpu)
    except RuntimeError as error:
        import jaxlib

        version = jaxlib.__version__
        raise UserError(
            f"planning compiles with jax's CUDA plugin, which is missing or does not load ({str(error)[:80]}); install "
            f"it: pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        ) from error
    mesh = Mesh(described.devices.reshape(1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    run = AbstractRun.make(
        model_config, method=config.method, dtype=jnp.dtype(config.dtype), lora=lora, quantization=quantization,
        optim=config.optim,
    )  # fmt: skip
    planner = _Planner(config, model_config, run, mesh)
    if config.longest:
        return planner.longest()
    return planner.report(planner.choose(config.max_seq_length, config.per_device_train_batch_size))


class _Planner:
    """One model and one GPU; asked for several shapes of batch."""

    def __init__(self, config: Any, model: ModelConfig, run: AbstractRun, mesh: Mesh) -> None:
        self.config, self.model, self.run, self.mesh = config, model, run, mesh
        self.target = TARGETS[config.gpu]
        given = config.memory_budget_gib
        self.budget = int(self.target.device_memory * _ALLOCATABLE) if given is None else int(given * _GIB)
        self.arguments = sum(run.num_bytes.values())
        self.itemsize = jnp.dtype(config.dtype).itemsize

    def work(self, seq: int, rows: int) -> Workload:
        return Workload(seq, seq * rows, self.itemsize, self.config.lora_r)

    def compile(self, plan: RematPlan, seq: int, rows: int) -> Any:
        accumulation = self.config.gradient_accumulation_steps
        return self.run.compile(plan, abstract_batch(accumulation, rows, seq, packed=self.config.packing), self.mesh)

    def choose(self, seq: int, rows: int) -> tuple[Choice, Workload]:
        """What `remat` names, or the plan that fits."""
        work = self.work(seq, rows)
        if self.config.remat == AUTO:
            choice = choose_plan(
                self.model, work, budget=self.budget, arguments=self.arguments,
                compile_step=lambda plan: self.compile(plan, seq, rows),
            )  # fmt: skip
            return choice, work
        plan = parse_plan(self.config.remat)
        compiled = self.compile(plan, seq, rows)
        share = recomputed_flop(plan, self.model, seq) / step_flop(self.model, seq)
        return Choice(plan, read_memory(compiled), share, compiled), work

    def report(self, found: tuple[Choice, Workload]) -> Report:
        choice, work = found
        kept = kept_bytes(choice.plan, self.model, work.seq, work.num_tokens, self.itemsize)
        kept = min(kept, choice.memory.workspace)
        parts = self.run.num_bytes | {
            "activations": kept,
            "workspace": choice.memory.peak - self.arguments - kept,
        }
        seconds = step_seconds(self.model, choice.plan, self.target, seq=work.seq, num_tokens=work.num_tokens)
        return Report(
            self.config.model, self.config.gpu, str(choice.plan), choice.memory.peak <= self.budget, self.budget,
            choice.memory.peak, parts, choice.memory.host, seconds, work.num_tokens / seconds,
        )  # fmt: skip

    def longest(self) -> Report:
        """The report of the longest row at batch 1, with the largest batch of max_seq_length beside it."""
        seq = self._largest(lambda seq: (seq, 1), _ROW_STEP)
        if seq == 0:
            return self.report(self.choose(_ROW_STEP, 1))
        wanted = min(self.config.max_seq_length, seq)
        rows = self._largest(lambda rows: (wanted, rows), 1)
        return replace(self.report(self.choose(seq, 1)), longest_row=seq, largest_batch=rows)

    def _largest(self, shape: Any, step: int) -> int:
        """The largest multiple of `step` whose leanest step fits: the cost model proposes, the compiler corrects it."""
        leanest = RematPlan(((self.model.num_hidden_layers, POLICIES["offload"]),))
        room = self.budget * 0.985 - self.arguments
        seq, rows = shape(step)
        per_token = workspace_guess(self.model, self.work(2048, 1)) / 2048
        size, best = max(1, int(room / per_token / (seq * rows))), 0
        for _ in range(4):
            seq, rows = shape(size * step)
            memory = read_memory(self.compile(leanest, seq, rows))
            if memory.peak <= self.budget * 0.985:
                best = max(best, size)
            used = max(memory.peak - self.arguments, 1)
            better = max(1, int(size * room / used * 0.998))
            if better == size or (best == size and better < size * 1.01):
                break
            size = better
        return best * step


def _model(config: Any, given: frozenset[str]) -> tuple[ModelConfig, QuantConfig | None, Any]:
    """(shapes, how the base is quantised, the adapters) of a run."""
    if config.model in PRESETS:
        model = ModelConfig.from_hf(preset(config.model) | _longer(config))
        quantization = None
        if config.method == "qlora":
            quantization = QuantConfig(
                config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, config.llm_int8_skip_modules or ()
            )
        return model, quantization, lora_settings(config, given)[1]
    base = open_base(config.model, config.adapter)
    config, form = quantization_settings(config, base, given)
    quantization = form.quantization or base.checkpoint.quantization
    return base.config, quantization, lora_settings(config, given)[1]


def _longer(config: TrainConfig) -> dict[str, Any]:
    # A preset is a shape; how long its makers trained it does not bound a plan.
    return {"max_position_embeddings": 1 << 20}

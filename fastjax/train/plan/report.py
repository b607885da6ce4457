"""The answer of `fastjax plan`: what a run needs of a described GPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from fastjax.errors import UserError
from fastjax.gpu_targets import TARGETS, target_mesh
from fastjax.models.base_form import read_base_form
from fastjax.models.config import ModelConfig
from fastjax.models.presets import PRESETS, preset
from fastjax.models.quant_config import QuantConfig
from fastjax.models.remat import AUTO, RematPlan, parse_plan
from fastjax.models.sharding import check_layout
from fastjax.train.config import TrainConfig
from fastjax.train.host_embedding import check_offload
from fastjax.train.memory import Need, savings
from fastjax.train.mesh import AXES, num_batch_shards
from fastjax.train.parts import adapter_folder, lora_settings, open_base, quantization_settings
from fastjax.train.plan.abstract import AbstractRun, abstract_batch
from fastjax.train.plan.choose import choose_plan, usable, workspace_guess
from fastjax.train.plan.collectives import collective_bytes
from fastjax.train.plan.costs import Workload, adapter_width, kept_bytes, planned_bytes
from fastjax.train.plan.memory import StepMemory, read_memory
from fastjax.train.plan.speed import step_seconds

_GIB = 2**30
# Of a GPU's memory: what the allocator takes, the driver's and the runtime's own share left out.
_ALLOCATABLE = 0.92
_ROW_STEP = 128
# Long enough that what does not grow with a row counts little.
_SAMPLE_ROW = 1 << 17
# Compilations of one search for a size, and how near to the room that there is it goes.
_MOST_SIZES = 4
_CLOSE = 1.01


@dataclass(frozen=True)
class Report:
    """What a step needs of each GPU, GiB and seconds.

    Attributes:
      mesh: as the settings name it; the GPUs are those of one host.
      parts: bytes on a device: weights, trained, optimizer, activations, workspace.
      fits: whether the peak is at most `budget`, which is what arrays can fill of the memory there is.
      tokens_per_second: of all GPUs together; with several, no time is counted for what they exchange.
      exchanged: collective and dtype -> bytes a step, see `collective_bytes`; empty for one GPU.
      longest_row, largest_batch: with `longest`, of batch 1 and of max_seq_length; else None.
    """

    model: str
    gpu: str
    mesh: str
    policy: str
    fits: bool
    budget: int
    peak: int
    parts: dict[str, int]
    host: int
    step_time_s: float
    tokens_per_second: float
    exchanged: dict[str, int]
    longest_row: int | None = None
    largest_batch: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """In a form that JSON takes; bytes as GiB."""
        gib = lambda value: round(value / _GIB, 3)  # noqa: E731
        return {
            "model": self.model, "gpu": self.gpu, "mesh": self.mesh, "fits": self.fits, "policy": self.policy,
            "peak_gib": gib(self.peak),
            "budget_gib": gib(self.budget), "parts_gib": {name: gib(value) for name, value in self.parts.items()},
            "host_gib": gib(self.host), "step_time_s": round(self.step_time_s, 4),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "exchanged_gib": {name: gib(value) for name, value in self.exchanged.items()},
            "longest_row": self.longest_row, "largest_batch": self.largest_batch,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = "\n".join(f"  {name:<12}{value / _GIB:8.2f} GiB" for name, value in self.parts.items())
        verdict = "fits" if self.fits else "does not fit"
        where = f"each {self.gpu} of the mesh {self.mesh}" if self.exchanged else self.gpu
        lines = [
            f"peak {self.peak / _GIB:.2f} GiB of {self.budget / _GIB:.2f} on {where}: {verdict}",
            parts,
            f"  {'host':<12}{self.host / _GIB:8.2f} GiB",
            f"remat={self.policy}",
            f"estimated    {self.step_time_s:.3f} s a step, {self.tokens_per_second:,.0f} tokens/s"
            + (", the exchange between GPUs left out" if self.exchanged else ""),
        ]
        for name, value in self.exchanged.items():
            lines.append(f"exchanged    {name} {value / _GIB:.3f} GiB a step")
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
    model_config, quantization, lora = model_of(config, given)
    shape = config.mesh_shape
    if shape is None:
        raise UserError(
            "mesh=auto counts the GPUs that are there, and a plan is for others; say how many, as in fsdp=2"
        )
    check_layout(model_config, *shape, quantized=quantization is not None)
    check_offload(config, model_config)
    try:
        described = target_mesh(config.gpu, math.prod(shape))
    except RuntimeError as error:
        import jaxlib

        version = jaxlib.__version__
        raise UserError(
            f"planning compiles with jax's CUDA plugin, which is missing or does not load ({str(error)[:80]}); install "
            f"it: pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        ) from error
    mesh = Mesh(described.devices.reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)
    run = AbstractRun.make(
        model_config, method=config.method, dtype=jnp.dtype(config.dtype), lora=lora, quantization=quantization,
        optim=config.optim, offload_embedding=config.offload_embedding,
    )  # fmt: skip
    planner = Planner(config, model_config, run, mesh)
    if config.longest:
        return planner.longest()
    return planner.choose(config.max_seq_length, config.per_device_train_batch_size)


class Planner:
    """One model and one GPU; asked for several shapes of batch."""

    def __init__(self, config: Any, model: ModelConfig, run: AbstractRun, mesh: Mesh) -> None:
        self.config, self.model, self.run, self.mesh = config, model, run, mesh
        self.target = TARGETS[config.gpu]
        given = config.memory_budget_gib
        self.budget = int(self.target.device_memory * _ALLOCATABLE) if given is None else int(given * _GIB)
        self.held = run.bytes_on(mesh)
        self.arguments = sum(self.held.values())
        self.itemsize = jnp.dtype(config.dtype).itemsize
        self.adapter_width = adapter_width(run.trainable)
        need = Need.of(config, model, run.trainable, run.optimizer, self.itemsize, mesh.size)
        self.ways = savings(config, need)
        self.compiled: dict[tuple[RematPlan, int, int], Any] = {}

    def work(self, seq: int, rows: int) -> Workload:
        return Workload(seq, seq * rows, self.itemsize, self.adapter_width)

    def compile(self, plan: RematPlan, seq: int, rows: int) -> Any:
        """The compiled step; each is compiled once. Args: rows: of each data-parallel GPU."""
        key = plan, seq, rows
        if key not in self.compiled:
            accumulation, all_rows = self.config.gradient_accumulation_steps, rows * num_batch_shards(self.mesh)
            looked_up = (self.model.hidden_size, self.config.dtype) if self.config.offload_embedding else None
            batch = abstract_batch(accumulation, all_rows, seq, packed=self.config.packing, rows=looked_up)
            self.compiled[key] = self.run.compile(plan, batch, self.mesh)
        return self.compiled[key]

    def memory(self, compiled: Any, seq: int, rows: int) -> StepMemory:
        """As the compiler reports it, but with the rows that a batch brings of the embedding in host memory."""
        memory = read_memory(compiled)
        if not self.config.offload_embedding:
            return memory
        # A described GPU has no host memory. A step of one micro-batch copies what is an argument here.
        one = rows * seq * self.model.hidden_size * self.itemsize
        table = self.model.vocab_size * self.model.hidden_size * self.itemsize
        accumulation = self.config.gradient_accumulation_steps
        beside = one * accumulation if accumulation > 1 else 0
        # The rows of the next batch are ready while this one's are read.
        return replace(memory, arguments=memory.arguments - beside, host=memory.host + table + 2 * one * accumulation)

    def choose(self, seq: int, rows: int) -> Report:
        """Of what `remat` names, or of the plan that fits."""
        if self.config.remat != AUTO:
            return self.report(parse_plan(self.config.remat), seq, rows)
        choice = choose_plan(
            self.model, self.work(seq, rows), budget=self.budget, arguments=self.arguments,
            compile_step=lambda plan: self.compile(plan, seq, rows), ways=self.ways,
            read=lambda compiled: self.memory(compiled, seq, rows),
        )  # fmt: skip
        return self.report(choice.plan, seq, rows)

    def report(self, plan: RematPlan, seq: int, rows: int) -> Report:
        """Of one plan, whether it fits or not."""
        compiled, work = self.compile(plan, seq, rows), self.work(seq, rows)
        memory = self.memory(compiled, seq, rows)
        kept = min(kept_bytes(plan, self.model, work), memory.workspace)
        parts = self.held | {"activations": kept, "workspace": memory.peak - self.arguments - kept}
        full = self.config.method == "full"
        seconds = step_seconds(self.model, plan, self.target, work, trains_base=full) / self.mesh.shape["tensor"]
        exchanged = {} if self.mesh.size == 1 else collective_bytes(compiled.as_text())
        return Report(
            self.config.model, self.config.gpu, self.config.mesh, str(plan), memory.peak <= usable(self.budget),
            usable(self.budget), memory.peak, parts, memory.host, seconds * self.config.gradient_accumulation_steps,
            work.num_tokens * num_batch_shards(self.mesh) / seconds,
            {" ".join(name): size for name, size in sorted(exchanged.items())},
        )  # fmt: skip

    def longest(self) -> Report:
        """The report of the longest row at batch 1, with the largest batch of max_seq_length beside it."""
        named = "offload" if self.config.remat == AUTO else self.config.remat
        plan = parse_plan(named)
        sample = self.work(_SAMPLE_ROW, 1)
        guess = workspace_guess(self.model, sample) + planned_bytes(plan, self.model, sample)
        seq, per_token = self._largest(plan, lambda seq: (seq, 1), _ROW_STEP, guess / _SAMPLE_ROW)
        if seq == 0:
            return self.report(plan, _ROW_STEP, 1)
        wanted = min(self.config.max_seq_length, seq)
        rows, _ = self._largest(plan, lambda rows: (wanted, rows), 1, per_token)
        return replace(self.report(plan, seq, 1), longest_row=seq, largest_batch=rows)

    def _largest(
        self, plan: RematPlan, shape: Callable[[int], tuple[int, int]], step: int, per_token: float
    ) -> tuple[int, float]:
        """The largest multiple of `step` that fits, and its bytes a token: a guess, which the compiler corrects.

        Args:
          shape: a size -> (tokens of a row, rows).
          per_token: what a token is thought to take beside the arguments.
        """
        room = usable(self.budget) - self.arguments
        best, tokens_of_one = 0, shape(step)[0] * shape(step)[1]
        size = max(1, int(room / per_token / tokens_of_one))
        measured: list[tuple[int, int]] = []
        for _ in range(_MOST_SIZES):
            seq, rows = shape(size * step)
            memory = self.memory(self.compile(plan, seq, rows), seq, rows)
            used = memory.peak - self.arguments
            measured.append((size, used))
            if used <= room:
                best, per_token = max(best, size), used / (size * tokens_of_one)
            better = _size_of(room, measured)
            if better <= best or (used <= room and better < size * _CLOSE) or better == size:
                break
            size = better
        return best * step, per_token


def _size_of(room: int, measured: list[tuple[int, int]]) -> int:
    """The size that fills `room` bytes, on the line through what was measured last."""
    size, used = measured[-1]
    slope = used / size
    if len(measured) > 1:
        other, others = measured[-2]
        slope = max((used - others) / (size - other), slope / 2)
    better = int(size + (room - used) / slope)
    # Sizes that do not fit come down by one at least.
    return max(0, min(better, size - 1) if used > room else better)


def model_of(config: Any, given: frozenset[str]) -> tuple[ModelConfig, QuantConfig | None, Any]:
    """(shapes, how the base is quantised, the adapters) of a run."""
    if config.model in PRESETS:
        model = ModelConfig.from_hf(preset(config.model) | _longer(config))
        return model, _quantization(config), lora_settings(config, given)[1]
    base = open_base(config.model, config.adapter)
    config, form = quantization_settings(config, base, given)
    quantization = form.quantization or base.checkpoint.quantization
    return base.config, quantization, lora_settings(config, given)[1]


def _quantization(config: TrainConfig) -> QuantConfig | None:
    """Of a preset: an adapter's own, else what the settings say."""
    if config.method != "qlora":
        return None
    form = None if config.adapter is None else read_base_form(adapter_folder(config.adapter))
    if form is not None:
        return form.quantization
    return QuantConfig(config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, config.llm_int8_skip_modules or ())


def _longer(config: TrainConfig) -> dict[str, Any]:
    # A preset is a shape; how long its makers trained it does not bound a plan.
    return {"max_position_embeddings": 1 << 20}

"""Everything a training run can be told, under the names that HF TrainingArguments, PEFT and TRL users type."""

import dataclasses
import re
import struct
from typing import Any, Literal

from fastjax.errors import UserError
from fastjax.hosts.connect import Place, place_of
from fastjax.models.remat import AUTO, parse_plan
from fastjax.settings import check_all, nearest, setting
from fastjax.train.data.rows import parse_columns
from fastjax.train.data.sources import parse_sources

_FLOAT16 = "there is no loss scaling here, so float16 gradients underflow, and every supported card has bfloat16"


# Steps and positions are int32 on the device; more rows than this a device is a slip of the hand.
_INT32 = 2**31
_MANY_ROWS = 2**20 + 1
_FLOAT32_MAX, _FLOAT32_TINY = (2 - 2**-23) * 2.0**127, 2.0**-126

# What a resumed run may change when it is told to. How it reports, saves, evaluates and recomputes, its devices where a
# micro-batch stays the same, and its end may change in any case; model, adapter and data may not at all.
OVERRIDABLE = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "weight_decay", "max_grad_norm",
    "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "mesh",
)  # fmt: skip


@dataclasses.dataclass
class RowConfig:
    """What training and evaluation are told alike: the model, the rows, and how rows become tokens."""

    model: str = setting("", "HF folder, hub id or .gguf file of the base model")
    data: str = setting(
        "",
        "rows: a .jsonl, .json, .csv, .parquet or .arrow file, a folder of them, or a hub id owner/name; "
        "NAME:SPLIT[START:STOP]*WEIGHT takes a part, commas join several",
    )
    adapter: str | None = setting(None, "adapter folder; its own rank, alpha and targets are used")

    data_format: Literal["auto", "input_ids", "messages", "conversations", "prompt", "alpaca", "text"] = setting(
        "auto", "form of the rows; auto recognises it by their keys"
    )
    data_columns: str | None = setting(
        None, "columns that hold the keys of a row form: prompt=question,completion=answer"
    )
    chat_template: str | None = setting(
        None, "file of a Jinja template, or chatml, llama-3, llama-2, mistral, zephyr, vicuna, alpaca; else the model's"
    )
    max_seq_length: int = setting(2048, "longest row, in tokens", minimum=2, below=_INT32)
    train_on: Literal["responses", "all"] = setting("responses", "which tokens are targets")
    long_rows: Literal["truncate", "drop", "split", "error"] = setting(
        "truncate", "what happens to rows above max_seq_length"
    )
    skip_bad_rows: bool = setting(False, "leave rows out that cannot be used, and count them, instead of stopping")
    data_cache_dir: str | None = setting(
        None, "where tokenised data are kept; else $FASTJAX_CACHE or ~/.cache/fastjax; the word off keeps nothing"
    )
    dataset_num_proc: int | None = setting(
        None, "processes that tokenise; else one a core where rows are many", minimum=1, below=1025
    )
    per_device_eval_batch_size: int = setting(
        8, "rows per data-parallel rank in evaluation", minimum=1, below=_MANY_ROWS
    )
    dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "dtype of the frozen weights and the activations", later={"float16": f"{_FLOAT16}; use bfloat16"}
    )
    mesh: str = setting(
        "data=1",
        "devices by axis, data=2,fsdp=2,tensor=2: data and fsdp split the batch, fsdp and tensor the weights; auto "
        "takes all devices, by fsdp where weights and states would fill over half of one, else by data",
    )

    def validate(self) -> None:
        """Check every value alone and the values together.

        Raises: UserError that names the setting, its value, the rule and the way out.
        """
        check_all(self)
        self._require("model", "the base model")
        self._require("data", "the rows")
        parse_sources(self.data)
        parse_columns(self.data_columns)
        self.mesh_shape  # noqa: B018  (parses mesh, raises)

    def _require(self, name: str, what: str) -> None:
        if not getattr(self, name):
            raise UserError(f"{name} is missing; give {what} as --{name} or in --config")

    @property
    def mesh_shape(self) -> tuple[int, int, int] | None:
        """Devices of the axes data, fsdp and tensor; None for auto. Raises: UserError if mesh says neither."""
        return None if self.mesh.strip() == "auto" else parse_mesh(self.mesh)

    @property
    def data_parallel_size(self) -> int:
        """Number of devices that share the rows of a batch. Raises: UserError for a mesh that is not understood."""
        if self.mesh_shape is not None:
            return self.mesh_shape[0] * self.mesh_shape[1]
        import jax

        return len(jax.devices())

    def to_dict(self) -> dict[str, Any]:
        """The settings as YAML and JSON hold them; `--config` reads them back to the same run.

        What to do with an earlier run is left out: it belongs to one start, and would delete that run at the next. So
        is where a process stands among others.
        """
        starts = ("resume", "resume_override", "overwrite_output_dir", "inspect", "html", *PLACE_SETTINGS)
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in starts}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclasses.dataclass
class TrainConfig(RowConfig):
    """The settings of one run; `validate` refuses what is impossible or contradictory."""

    output_dir: str = setting("", "folder of the run: config, metrics, checkpoints, adapter")

    method: Literal["qlora", "lora", "full"] = setting(
        "qlora", "train adapters over a 4-bit base, adapters over a 16-bit base, or every weight"
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = setting("nf4", "4-bit code table of a base that qlora quantises")
    bnb_4bit_use_double_quant: bool = setting(True, "whether qlora codes the block scales in 8 bits")
    llm_int8_skip_modules: tuple[str, ...] | None = setting(
        None, "linear modules that qlora leaves in 16 bit, as transformers reads this list; the head always is"
    )
    lora_r: int = setting(16, "rank of the adapters", minimum=1, below=_INT32)
    lora_alpha: float = setting(16.0, "adapter scale is lora_alpha / lora_r", above=0)
    lora_dropout: float = setting(0.0, "dropout on the adapters' input", minimum=0, below=1)
    target_modules: str | tuple[str, ...] = setting(
        "all-linear", "all-linear, module names a,b,c, or a regular expression that full module names match"
    )
    use_rslora: bool = setting(False, "scale by lora_alpha / sqrt(lora_r)")
    layers_to_transform: tuple[int, ...] | None = setting(None, "only these layers get adapters: 0,1,2")
    rank_pattern: dict[str, int] = setting({}, 'ranks that differ by module, as JSON: {"q_proj": 8}')
    alpha_pattern: dict[str, float] = setting({}, "alphas that differ by module, as JSON")
    modules_to_save: tuple[str, ...] | None = setting(None, "trained in full beside the adapters: embed_tokens,lm_head")

    packing: bool = setting(False, "several documents a row of max_seq_length, apart from each other")

    eval_data: str | None = setting(None, "rows to evaluate on, given as data is")
    eval_fraction: float = setting(0.0, "part of the rows of data that is held out to evaluate on", minimum=0, below=1)
    eval_steps: int | None = setting(None, "evaluate every N optimiser steps (at the end in any case)", minimum=1)
    early_stopping_patience: int | None = setting(
        None, "stop after so many evaluations in a row that brought no lower eval_loss", minimum=1
    )
    early_stopping_threshold: float = setting(0.0, "by how much eval_loss must fall to count as lower", minimum=0)
    load_best_model_at_end: bool = setting(
        False, "save the weights of the lowest eval_loss instead of the last; their checkpoint is kept"
    )
    metric_for_best_model: Literal["eval_loss", "loss"] = setting("eval_loss", "what the best is judged by")

    per_device_train_batch_size: int = setting(
        2, "rows per data-parallel rank and micro-batch", minimum=1, below=_MANY_ROWS
    )
    gradient_accumulation_steps: int = setting(4, "micro-batches per optimiser step", minimum=1, below=_MANY_ROWS)
    num_train_epochs: float = setting(1.0, "passes over the data", above=0, below=_INT32)
    max_steps: int | None = setting(None, "optimiser steps; overrides num_train_epochs", minimum=1, below=_INT32)

    learning_rate: float = setting(2e-4, "peak learning rate", minimum=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = setting(
        "linear", "shape of the learning rate after warm-up"
    )
    warmup_steps: int = setting(0, "steps in which the learning rate rises from 0", minimum=0, below=_INT32)
    warmup_ratio: float = setting(0.0, "the same as a part of all steps", minimum=0, below=1)
    weight_decay: float = setting(0.01, "AdamW's decoupled weight decay", minimum=0)
    max_grad_norm: float = setting(1.0, "clip the global gradient norm to this; 0 turns clipping off", minimum=0)
    optim: Literal["adamw", "adamw_8bit", "adamw_bf16"] = setting(
        "adamw", "AdamW with moments in float32, in blocks of 8 bits as bitsandbytes has them, or in bfloat16"
    )
    adam_beta1: float = setting(0.9, "AdamW's first decay rate", minimum=0, below=1)
    adam_beta2: float = setting(0.999, "AdamW's second decay rate", minimum=0, below=1)
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon", above=0)
    seed: int = setting(3407, "seed of adapters, order of rows, and dropout", minimum=0, below=2**32)

    remat: str = setting(
        "auto",
        "what the backward keeps: auto (what fits the memory), none (all), most, no_matmul, attention, full (the "
        "layers' inputs), offload (those, in host memory); or activations by name, and runs of layers: "
        "12*no_matmul,full; unrolled,most compiles the layers one by one, which is faster and takes longer to compile",
    )
    memory_budget_gib: float | None = setting(
        None, "GiB of each device that remat=auto may fill; none: what the allocator has", above=0
    )

    grad_compression: Literal["none", "int8", "int4"] = setting(
        "none", "sum the gradients of method=full over the data axis in 8 or 4 bits, errors carried to the next step"
    )
    offload_embedding: bool = setting(
        False, "keep the frozen embedding's table in host memory; only the rows of a batch travel to the device"
    )

    nonfinite: Literal["stop", "skip"] = setting(
        "stop", "on a loss or gradient that is not finite: stop (exit code 4), or skip the update and count it"
    )

    logging_steps: int = setting(1, "log every N optimiser steps", minimum=1)
    save_steps: int = setting(500, "checkpoint every N optimiser steps (at the end in any case)", minimum=1)
    save_total_limit: int | None = setting(None, "keep at most this many checkpoints", minimum=1)
    resume: str = setting("never", "never, auto (the newest checkpoint of output_dir), or a checkpoint folder")
    resume_override: tuple[str, ...] | None = setting(
        None, f"settings in which a resumed run may differ from its checkpoint, of {', '.join(OVERRIDABLE)}"
    )
    overwrite_output_dir: bool = setting(False, "delete the earlier run in output_dir and start anew")
    distributed: Literal["none", "auto"] = setting(
        "none", "auto: one of several processes, started by Slurm, Open MPI or Kubernetes as jax detects them"
    )
    coordinator: str | None = setting(None, "one of several processes: host:port of process 0, a free port there")
    num_processes: int | None = setting(None, "how many processes there are", minimum=1)
    process_id: int | None = setting(None, "which of them this is, from 0", minimum=0)
    report_to: Literal["tensorboard", "wandb", "none"] = setting("tensorboard", "where else metrics go")
    sample_prompt: str | None = setting(None, "print the greedy answer to this before and after training")
    inspect: int | None = setting(None, "print this many training rows as they will be trained, and stop", minimum=1)
    html: str | None = setting(None, "with inspect: write a page instead of printing")

    def validate(self) -> None:
        super().validate()
        if self.inspect is None:
            self._require("output_dir", "the folder of the run")
        if self.remat != AUTO:
            parse_plan(self.remat)
            if self.memory_budget_gib is not None:
                raise UserError(
                    f"memory_budget_gib={self.memory_budget_gib} with remat={self.remat!r}, which keeps the same "
                    "whatever the memory; use remat=auto"
                )
        self._validate_schedule()
        self._validate_float32()
        self._validate_lora()
        self._validate_evaluation()
        self._validate_override()
        if self.grad_compression != "none" and self.method != "full":
            raise UserError(
                f"grad_compression={self.grad_compression} with method={self.method}, whose gradients are those of "
                "small adapters: rounding them would save nothing; leave it out, or use method=full"
            )
        self.place  # noqa: B018  (parses it, raises)
        if self.html is not None and self.inspect is None:
            raise UserError(f"html={self.html!r} without inspect; say with --inspect N how many rows the page shows")
        if self.resume != "never" and self.overwrite_output_dir:
            raise UserError(
                f"resume={self.resume!r} goes on with the run that overwrite_output_dir deletes; choose one of the two"
            )

    @property
    def place(self) -> Place | None:
        """Where this process stands among those of the run; None if it is alone. Raises: as `place_of`."""
        return place_of(self.distributed, self.coordinator, self.num_processes, self.process_id)

    def _validate_evaluation(self) -> None:
        """Raises: UserError for a setting that needs evaluations that there are not."""
        if self.eval_data is not None:
            parse_sources(self.eval_data)
            if self.eval_fraction:
                raise UserError(
                    f"eval_data={self.eval_data!r} and eval_fraction={self.eval_fraction} both give rows to evaluate "
                    "on; leave one of the two out"
                )
        has_rows = self.eval_data is not None or self.eval_fraction > 0
        for name in ("eval_steps", "early_stopping_patience", "load_best_model_at_end"):
            value = getattr(self, name)
            if value not in (None, False) and not has_rows:
                raise UserError(
                    f"{name}={value} without eval_data; name the rows with eval_data, or hold some out with "
                    "eval_fraction"
                )
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise UserError(
                f"early_stopping_patience={self.early_stopping_patience} without eval_steps; say how often to evaluate"
            )
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise UserError(
                f"early_stopping_threshold={self.early_stopping_threshold} without early_stopping_patience; give both"
            )

    def _validate_override(self) -> None:
        unknown = [name for name in self.resume_override or () if name not in OVERRIDABLE]
        if unknown:
            raise UserError(
                f"resume_override={unknown[0]!r}: of what a checkpoint fixes, a resumed run may change "
                f"{', '.join(OVERRIDABLE)}; max_steps, num_train_epochs, and where and when it logs and saves, are not "
                f"fixed and need no override{nearest(unknown[0], OVERRIDABLE)}"
            )
        if self.resume_override and self.resume == "never":
            raise UserError(
                f"resume_override={','.join(self.resume_override)} without resume; say what to go on from, with "
                "resume=auto"
            )

    def _validate_schedule(self) -> None:
        warmup = "warmup_steps" if self.warmup_steps else "warmup_ratio"
        if self.lr_scheduler_type == "constant" and getattr(self, warmup):
            raise UserError(
                f"{warmup}={getattr(self, warmup)} with lr_scheduler_type='constant', which has no warm-up; "
                "use lr_scheduler_type=constant_with_warmup"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise UserError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} both set the warm-up; give one"
            )

    def _validate_float32(self) -> None:
        """The step computes in float32, where a number may overflow, or round to one that divides by 0."""
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "lora_alpha"):
            if getattr(self, name) > _FLOAT32_MAX:
                raise UserError(f"{name}={getattr(self, name)} is too large for float32; make it smaller")
        for name in ("adam_beta1", "adam_beta2"):
            if struct.unpack("f", struct.pack("f", getattr(self, name)))[0] == 1:
                raise UserError(f"{name}={getattr(self, name)} is 1 in float32, and must be below; make it smaller")
        if not _FLOAT32_TINY <= self.adam_epsilon <= _FLOAT32_MAX:
            raise UserError(f"adam_epsilon={self.adam_epsilon} is 0 or infinite in float32; give one such as 1e-8")

    def _validate_lora(self) -> None:
        if self.method != "qlora":
            changed = [name for name in QUANT_SETTINGS if getattr(self, name) != default_of(name)]
            if changed:
                raise UserError(
                    f"{changed[0]}={getattr(self, changed[0])!r} belongs to method=qlora, and method={self.method} has "
                    f"no 4-bit weights; leave {changed[0]} out"
                )
        if self.method == "full":
            changed = [name for name in LORA_SETTINGS if getattr(self, name) != default_of(name)]
            if changed:
                raise UserError(
                    f"{changed[0]}={getattr(self, changed[0])!r} belongs to method=qlora and lora, and "
                    f"method=full trains every weight; leave {changed[0]} out"
                )
        for name, values in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            for module, value in values.items():
                if value <= 0 or (name == "rank_pattern" and value != int(value)):
                    rule = "a rank is a whole number above 0" if name == "rank_pattern" else "an alpha is above 0"
                    raise UserError(f"{name} gives {module!r} the value {value}; {rule}")
        if any(layer < 0 for layer in self.layers_to_transform or ()):
            raise UserError(f"layers_to_transform={list(self.layers_to_transform or ())}; layers count from 0")


PLACE_SETTINGS = ("distributed", "coordinator", "num_processes", "process_id")


def parse_mesh(text: str) -> tuple[int, int, int]:
    """Devices of the axes data, fsdp and tensor in a text such as data=2,fsdp=4.

    Raises: UserError for another text.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(data|fsdp|tensor)\s*=\s*(\d{1,6})\s*", part)
        if not found or found[1] in axes or int(found[2]) < 1:
            raise UserError(
                f"mesh={text!r} is not understood at {part!r}; write data=N, fsdp=N and tensor=N with N of 1 or more, "
                "joined by commas, or auto"
            )
        axes[found[1]] = int(found[2])
    return axes.get("data", 1), axes.get("fsdp", 1), axes.get("tensor", 1)


QUANT_SETTINGS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_skip_modules")

# The first is ours alone, the next two have shorter names in PEFT, the others the same.
LORA_SETTINGS = (
    "adapter",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
)


def default_of(name: str) -> Any:
    """A training setting's value when nothing is said."""
    field = TrainConfig.__dataclass_fields__[name]
    return {} if field.default is dataclasses.MISSING else field.default

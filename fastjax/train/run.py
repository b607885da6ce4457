"""A whole run, read top to bottom: from settings to the saved adapter.

Whatever can be found wrong without the weights is found before they are loaded: settings, output folder, model headers,
adapter settings, template, rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from fastjax.devices import note_slow_dtype
from fastjax.errors import UserError
from fastjax.hosts.exchange import check_same, from_first, is_first
from fastjax.models.checkpoint.files import replace_folder
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.save import save_model
from fastjax.models.checkpoint.tokenizer import save_tokenizer
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, apply_lora
from fastjax.models.peft_io import load_adapter, save_adapter
from fastjax.train.config import TrainConfig
from fastjax.train.data import Dataset, TrainingRows, prompt_ids
from fastjax.train.data.sources import parse_sources
from fastjax.train.host_embedding import check_offload
from fastjax.train.loop import Trainer
from fastjax.train.mesh import check_compresses, check_covers_processes, config_mesh
from fastjax.train.metrics import check_writer
from fastjax.train.parts import (
    Base,
    answer,
    check_targets,
    lora_settings,
    open_base,
    quantization_settings,
)
from fastjax.train.result import TrainResult
from fastjax.train.rows import set_chat_template, training_rows
from fastjax.train.run_folder import RunFolder

if TYPE_CHECKING:
    from jax.sharding import Mesh

Say = Callable[[str], None]

_SAMPLE_TOKENS = 64


@dataclass(frozen=True)
class RunResult:
    """What a run leaves behind.

    Attributes:
      training: steps, loss and evaluation.
      saved: the adapter's folder, or the model's.
      sample: the answers to sample_prompt before and after, or None.
    """

    training: TrainResult
    saved: Path
    sample: tuple[str, str] | None

    @property
    def training_loss(self) -> float | None:
        """Mean loss of a target token over this call's steps."""
        return self.training.training_loss

    @property
    def metrics(self) -> dict[str, float | None]:
        """This call's figures under HF's names, see `TrainResult`."""
        return self.training.metrics

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """The objects of metrics.jsonl."""
        return self.training.log_history

    def to_dict(self) -> dict[str, Any]:
        """In a form that JSON takes."""
        training, evaluation = self.training, self.training.evaluation
        return {
            "saved": str(self.saved),
            "step": training.step,
            "loss": training.loss,
            "training_loss": training.training_loss,
            "eval_loss": None if evaluation is None else evaluation.loss,
            "best_step": None if training.best is None else training.best.step,
            "best_eval_loss": None if training.best is None else training.best.eval_loss,
            "num_target_tokens": training.num_target_tokens,
            "num_tokens": training.num_tokens,
            "seconds": training.seconds,
            "metrics": training.metrics,
            "sample": None if self.sample is None else dict(zip(("before", "after"), self.sample, strict=True)),
        }

    def __str__(self) -> str:
        training, evaluation = self.training, self.training.evaluation
        loss = "" if training.loss is None else f", loss {training.loss:.4f}"
        eval_loss = "" if evaluation is None else f", eval_loss {evaluation.loss:.4f}"
        steps = f"{training.step - training.first_step} steps"
        if training.first_step:
            steps += f" ({training.first_step + 1} to {training.step})" if training.step > training.first_step else ""
        return f"{steps} in {training.seconds:.0f} s{loss}{eval_loss}; saved in {self.saved}"


def run(config: TrainConfig, given: frozenset[str] = frozenset(), say: Say = print) -> RunResult:
    """Train as the settings say.

    Args:
      config: validated.
      given: names of the settings that the user gave, see `lora_settings`.
      say: takes each message meant for a person.
    Raises: what `Trainer.train` raises, and UserError for everything that is wrong before it; then nothing is written.
    """
    folder = RunFolder(Path(config.output_dir))
    check_same("settings", config.to_dict())
    from_first(lambda: folder.check(config.resume, config.overwrite_output_dir))
    _check_sources(config)
    check_writer(config.report_to)
    base = open_base(config.model, config.adapter)
    config, lora = lora_settings(config, given)
    check_offload(config, base.config)
    if lora is not None:
        check_targets(lora, base.config, strict=config.adapter is None)
    set_chat_template(base, config)
    if config.sample_prompt is not None:
        prompt_ids(base.tokenizer, config.sample_prompt, chat=bool(base.tokenizer.chat_template))
    config, form = quantization_settings(config, base, given)
    is_4bit = form.quantization is not None or base.checkpoint.quantization is not None
    mesh = config_mesh(config, base.config, config.method, quantized=is_4bit)
    check_covers_processes(mesh)
    check_compresses(config.grad_compression, mesh)
    rows, eval_rows = training_rows(config.data, config.eval_data, config, base)
    note_slow_dtype(config.dtype, given)
    model = load_model(base.checkpoint, config.dtype, mesh, quantization=form.quantization, quantize_from=form.dtype)
    if config.adapter is not None:
        lora = load_adapter(model, config.adapter)
    elif lora is not None:
        apply_lora(model, lora, jax.random.key(config.seed))
    return train_model(config, base, model, lora, rows, eval_rows, mesh=mesh, say=say)


def train_model(
    config: TrainConfig,
    base: Base,
    model: CausalLM,
    lora: LoraConfig | None,
    rows: TrainingRows,
    eval_rows: Dataset | None = None,
    *,
    mesh: "Mesh | None" = None,
    say: Say = print,
) -> RunResult:
    """Train a model that is in memory, save the result into the run's folder, and show the sample prompt's answers.

    Args:
      lora: what the model's adapter was made from; None trains every weight.
    """

    def save(trained: CausalLM, folder: RunFolder) -> None:
        # Every process takes part in reading what is spread over them; one writes.
        if lora is None:
            save_model(
                trained, folder.model if is_first() else None, dtype=config.dtype, tokenizer=base.tokenizer,
                overwrite=True, generation_config=base.checkpoint.generation_config,
            )  # fmt: skip
            return
        if not is_first():
            save_adapter(trained, lora, None)
            return
        with replace_folder(folder.adapter, overwrite=True) as target:
            save_adapter(trained, lora, target, base.checkpoint.name)
            save_tokenizer(base.tokenizer, target)

    before: list[str] = []

    def start(loaded: CausalLM) -> None:
        before.extend(_sample(config, base, loaded, "before", say))

    trainer = Trainer(model, config, rows, eval_rows, lora=lora, mesh=mesh, start=start, finish=save, say=say)
    from_first(lambda: trainer.folder.check(config.resume, config.overwrite_output_dir))
    for report in (rows.report, None if eval_rows is None else eval_rows.report):
        if report is not None:
            say(str(report))
    say(_plan(trainer))
    training = trainer.train()
    after = _sample(config, base, model, "after", say) if before else []
    saved = trainer.folder.model if lora is None else trainer.folder.adapter
    return RunResult(training, saved, (before[0], after[0]) if before else None)


def _plan(trainer: Trainer) -> str:
    config, epochs = trainer.config, trainer.total_steps / trainer.steps_per_epoch
    devices = ", ".join(sorted({device.device_kind for device in trainer.mesh.devices.flat}))
    return (
        f"steps    {trainer.total_steps:,} ({epochs:.2f} epochs) of {trainer.batch_size} x "
        f"{config.gradient_accumulation_steps} rows on {trainer.mesh.size} {devices}, {config.method}, {config.dtype}"
    )


def _sample(config: TrainConfig, base: Base, model: CausalLM, when: str, say: Say) -> list[str]:
    """The answer to sample_prompt, if there is one."""
    if config.sample_prompt is None:
        return []
    texts = answer(model, base, [config.sample_prompt], max_new_tokens=_SAMPLE_TOKENS)
    say(f"\n{when} training, {config.sample_prompt!r} is answered:\n{texts[0]}\n")
    return texts


def _check_sources(config: TrainConfig) -> None:
    """Raises: UserError if overwriting the output folder would delete what the run reads."""
    if not config.overwrite_output_dir:
        return
    folder = Path(config.output_dir).resolve()
    named = [(name, getattr(config, name)) for name in ("model", "adapter")]
    for name in ("data", "eval_data"):
        named += [(name, source.name) for source in parse_sources(getattr(config, name) or "-")]
    for name, value in named:
        if value and Path(value).exists() and folder in (Path(value).resolve(), *Path(value).resolve().parents):
            raise UserError(
                f"{name}={value!r} lies in output_dir={config.output_dir!r}, which overwrite_output_dir would delete; "
                "give another output_dir"
            )

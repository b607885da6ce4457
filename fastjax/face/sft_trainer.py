"""SFTTrainer: a run over a model that is in memory."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.face.language_model import LanguageModel
from fastjax.face.python_words import in_python_words
from fastjax.face.refusals import CHANGE_NOTHING, TRAINER, note, refuse, tell_ignored
from fastjax.face.row_words import field_as_text, formatted_rows
from fastjax.face.sft_config import SFTConfig
from fastjax.train.config import TrainConfig

if TYPE_CHECKING:
    from fastjax.face.train_output import TrainOutput

Rows = str | Path | Iterable[Mapping[str, Any]]


@dataclasses.dataclass
class TrainerState:
    """Where the last run of a trainer came to.

    Attributes:
      global_step: optimiser steps done.
      log_history: the objects of metrics.jsonl.
    """

    global_step: int = 0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class SFTTrainer:
    """Supervised fine-tuning of a model's adapter, or of every weight of a model without one.

    Args:
      model: from FastLanguageModel; it is trained in place.
      tokenizer: the model's own where None; `processing_class` is TRL's newer name for it.
      train_dataset: rows as dicts, a `datasets.Dataset`, or a file's path.
      eval_dataset: the same, for the evaluation loss.
      args: the run's settings.
      formatting_func: makes a text, or a list of texts, of each row; these are trained on instead.
      dataset_text_field: the column that holds each row's text; it wins over other columns that make a row form.
    Attributes:
      state: global_step and log_history of the last `train`.
    Raises: UserError for rows that cannot be used, and for arguments that cannot be honoured.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        args: SFTConfig | None = None,
        *,
        processing_class: Any = None,
        max_seq_length: int | None = None,
        formatting_func: Callable[[Any], Any] | None = None,
        dataset_text_field: str | None = None,
        **arguments: Any,
    ) -> None:
        ignored = {name: arguments.pop(name) for name in list(arguments) if name in CHANGE_NOTHING}
        known = ("model", "tokenizer", "train_dataset", "eval_dataset", "args", "processing_class", "max_seq_length")
        refuse("SFTTrainer", TRAINER, arguments, (*known, "formatting_func", "dataset_text_field"))
        tell_ignored(ignored)
        if not isinstance(model, LanguageModel):
            raise UserError(f"model is a {type(model).__name__}; give what FastLanguageModel.from_pretrained returned")
        if tokenizer is not None and processing_class is not None:
            raise UserError("tokenizer and processing_class are two names for one thing; give one")
        if train_dataset is None:
            raise UserError("train_dataset is missing; give rows as dicts, a datasets.Dataset or a file's path")
        self.model = model
        self.args = args or SFTConfig()
        if not isinstance(self.args, SFTConfig):
            raise UserError(
                f"args is a {type(self.args).__name__}; give a fastjax.SFTConfig, which takes its arguments"
            )
        self.state = TrainerState()
        self.base = dataclasses.replace(model.base, tokenizer=tokenizer or processing_class or model.base.tokenizer)
        self._check_with_model()
        field = dataset_text_field or self.args.for_trainer.get("dataset_text_field")
        self._train_source = _source(train_dataset, formatting_func, field)
        self._eval_source = None if eval_dataset is None else _source(eval_dataset, formatting_func, field)
        with in_python_words():
            self.config = self._config(max_seq_length, train_dataset, eval_dataset)
            self._validate()
            self._load_rows()
            self._set_epoch_steps()

    def train(self, resume_from_checkpoint: bool | str | None = None) -> "TrainOutput":
        """Train to the end, and leave the run's folder as the command line does.

        Args:
          resume_from_checkpoint: True goes on from the newest checkpoint in output_dir, a path from that one.
        Returns: .training_loss, .metrics (train_runtime in seconds, ...) and .global_step as in TRL; .saved is the
          folder of the adapter, or of the model.
        """
        from fastjax.face.train_output import TrainOutput
        from fastjax.train.run import train_model

        config, model = self.config, self.model
        if resume_from_checkpoint:
            resume = "auto" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            config = dataclasses.replace(config, resume=resume)
        with in_python_words():
            config.validate()
            result = train_model(config, self.base, model.model, model.lora, self.train_rows, self.eval_rows)
        self.state = TrainerState(result.training.step, result.log_history)
        return TrainOutput(**vars(result))

    def evaluate(self) -> dict[str, float]:
        """{eval_loss, perplexity, num_target_tokens} over the evaluation rows."""
        import math

        from fastjax.models.quantized import is_quantized
        from fastjax.train.mesh import config_mesh
        from fastjax.train.parts import evaluate_model

        if self.eval_rows is None:
            raise UserError("there are no evaluation rows; give eval_dataset to SFTTrainer")
        model = self.model.model
        mesh = config_mesh(self.config, model.config, "lora", quantized=is_quantized(model))
        result = evaluate_model(model, self.eval_rows, self.config.per_device_eval_batch_size, mesh)
        perplexity = math.exp(result.loss) if result.loss < 700 else math.inf
        return {"eval_loss": result.loss, "perplexity": perplexity, "num_target_tokens": result.num_target_tokens}

    def inspect(self, num_rows: int = 3, html: str | Path | None = None) -> None:
        """Print rows as they will be trained, and what became of all rows; `html` writes a page instead."""
        from fastjax.train.inspect_html import write_inspection
        from fastjax.train.inspect_rows import Inspection, first_rows, print_inspection

        shown = list(first_rows(self.train_rows, self.base.tokenizer, self.config, num_rows))
        found = Inspection(shown, self.train_rows.report, None if self.eval_rows is None else self.eval_rows.report)
        if html is None:
            print_inspection(found)
        else:
            with in_python_words():
                write_inspection(found, str(html))

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the adapter, or the whole model where there is none; into the run's folder if no other is named."""
        kind = "model" if self.model.lora is None else "adapter"
        self.model.save_pretrained(output_dir or Path(self.config.output_dir) / kind, self.base.tokenizer)

    def train_on_responses(self, parts: tuple[str, str] | None) -> None:
        """Make the answers the only targets, reading the rows again.

        Args:
          parts: what stands before a user's turn and before an answer in rows of text; None where rows are chats.
        """
        with in_python_words():
            self.config = dataclasses.replace(self.config, train_on="responses")
            self._load_rows(parts)

    def _load_rows(self, parts: tuple[str, str] | None = None) -> None:
        from fastjax.train.rows import set_chat_template, training_rows

        set_chat_template(self.base, self.config)
        self.train_rows, self.eval_rows = training_rows(
            self._train_source, self._eval_source, self.config, self.base, parts
        )

    def _config(self, max_seq_length: int | None, train: Rows, evaluation: Rows | None) -> TrainConfig:
        """The arguments as the settings of a run, with what the model brings."""
        from fastjax.train.parts import settings_of

        if self.model.lora is None and self.model.quantization is not None:
            raise UserError(
                "the model's weights are 4-bit, and only adapters can be trained over them; call "
                "FastLanguageModel.get_peft_model first, or load the model with load_in_4bit=False to train every "
                "weight"
            )
        model, given = self.model, self.args.given
        length = given.get("max_seq_length", max_seq_length or model.max_seq_length)
        if max_seq_length is not None and length != max_seq_length:
            raise UserError(f"max_seq_length is {max_seq_length} and, in args, {length}; give one")
        return dataclasses.replace(
            self.args.train_config,
            model=model.base.checkpoint.name,
            data=str(train) if isinstance(train, str | Path) else "rows in memory",
            eval_data=None if evaluation is None else (
                str(evaluation) if isinstance(evaluation, str | Path) else "rows in memory"
            ),
            max_seq_length=length,
            dtype=model.model.dtype.name,
            remat=given.get("remat", model.remat),
            **settings_of(model.lora),
            **_method(model),
        )  # fmt: skip

    def _validate(self) -> None:
        if "eval_steps" in self.args.each_epoch and self.config.eval_data is None and not self.config.eval_fraction:
            raise UserError("eval_strategy='epoch' without eval_dataset; give the rows to evaluate on")
        self.config.validate()

    def _check_with_model(self) -> None:
        """Arguments of SFTConfig that could not be judged without the model and its tokenizer."""
        words, dtype = self.args.for_trainer, self.model.model.dtype.name
        if words.get("bf16") and dtype != "bfloat16":
            raise UserError(
                f"bf16=True, and the model's dtype is {dtype}; load it with dtype='bfloat16' (or None), or leave bf16 "
                "out"
            )
        if words.get("bf16") is False and dtype == "bfloat16":
            note("bf16=False changes nothing: the model is bfloat16; to train in float32, load it with dtype='float32'")
        if words.get("tf32") and dtype == "float32":
            raise UserError(
                "tf32=True cannot be honoured by SFTConfig: say jax.config.update('jax_default_matmul_precision', "
                "'tensorfloat32') before the model is loaded"
            )
        tokenizer = self.base.tokenizer
        for name in ("eos_token", "pad_token"):
            if name in words and words[name] != getattr(tokenizer, name):
                raise UserError(
                    f"{name}={words[name]!r}, and the tokenizer's is {getattr(tokenizer, name)!r}; set "
                    f"tokenizer.{name} and give that tokenizer to SFTTrainer"
                )
        seed = self.args.train_config.seed
        if words.get("data_seed", seed) != seed:
            raise UserError(
                f"data_seed={words['data_seed']} and seed={seed}: one seed gives the order of the rows and all else; "
                "leave data_seed out"
            )

    def _set_epoch_steps(self) -> None:
        """save_strategy="epoch" and its like, once the number of rows is known."""
        from fastjax.train.data import steps_per_epoch

        config = self.config
        batch_size = config.per_device_train_batch_size * config.data_parallel_size
        steps = steps_per_epoch(len(self.train_rows), batch_size, config.gradient_accumulation_steps)
        of_an_epoch: dict[str, Any] = dict.fromkeys(self.args.each_epoch, steps)
        self.config = dataclasses.replace(config, **of_an_epoch)


def _method(model: LanguageModel) -> dict[str, Any]:
    """The method of training, and how the base is quantised, under the names of the run's settings."""
    if model.lora is None:
        return {"method": "full"}
    if model.quantization is None:
        return {"method": "lora"}
    names = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_skip_modules")
    quantization = model.quantization
    values = (quantization.quant_type, quantization.double_quant, quantization.skip_modules or None)
    return {"method": "qlora", **dict(zip(names, values, strict=True))}


def train_on_responses_only(
    trainer: SFTTrainer, instruction_part: str | None = None, response_part: str | None = None, **arguments: Any
) -> SFTTrainer:
    """The trainer, with the answers as its only targets: what it does anyway with rows that are chats.

    Args:
      instruction_part, response_part: what stands before a user's turn and before an answer; rows of text need both,
        chats need neither: their answers follow from the chat template.
    Raises: UserError for rows of text without the two parts, and for arguments that cannot be honoured.
    """
    known = {"num_proc": None, "tokenizer": None, "force_match": None, "return_function": None}
    refuse("train_on_responses_only", {"return_function": ((False, None), "the trainer is returned")},
           {n: v for n, v in arguments.items() if n not in known or n == "return_function"}, tuple(known))  # fmt: skip
    has_text = bool(trainer.train_rows.report.forms.get("text"))
    if has_text and not (instruction_part and response_part):
        raise UserError(
            "rows of text are learned whole; give instruction_part and response_part, or the conversations themselves "
            "as `messages`, whose answers are found by the chat template"
        )
    if not has_text and trainer.config.train_on == "responses":
        note("train_on_responses_only changes nothing: the answers are the only targets already (train_on='responses')")
        return trainer
    trainer.train_on_responses((str(instruction_part), str(response_part)) if has_text else None)
    return trainer


def _source(rows: Rows, formatting_func: Callable[[Any], Any] | None, field: str | None) -> Any:
    """Rows that can be read more than once, with the text made by the function or taken from the column."""
    from fastjax.train.data.readers import read_rows

    given: Any = str(rows) if isinstance(rows, Path) else rows
    if formatting_func is not None:
        return list(formatted_rows(read_rows(given), formatting_func))
    if field is not None:
        return list(field_as_text(read_rows(given), field))
    return list(given) if not isinstance(given, str) and iter(given) is given else given

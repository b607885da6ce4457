"""SFTConfig: a training run's settings under the names that TRL and HF TrainingArguments users type."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastjax.errors import UserError
from fastjax.face.refusals import CHANGE_NOTHING, SFT_CONFIG, complaints, raise_all, tell_ignored
from fastjax.settings import check, field_types, rule_of
from fastjax.train.config import LORA_SETTINGS, PLACE_SETTINGS, QUANT_SETTINGS, TrainConfig

# Settings of a run that the model and the data of a trainer bring with them.
_BROUGHT = (
    "model", "data", "eval_data", "sample_prompt", "inspect", "html", "method", "dtype", *PLACE_SETTINGS,
    *QUANT_SETTINGS, *LORA_SETTINGS,
)  # fmt: skip

_SAME_OPTIMIZER = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf")
# Paging is about where the same state lies when memory runs out.
_EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")

# Arguments that only the model, its tokenizer or the rows can answer: SFTTrainer does.
FOR_TRAINER = ("bf16", "fp16", "tf32", "dataset_text_field", "eos_token", "pad_token", "data_seed")
_STRATEGIES = {"save_strategy": "save_steps", "eval_strategy": "eval_steps", "logging_strategy": "logging_steps"}
_HF_LOGGING_STEPS = 500
_NO_CHECKPOINT_BEFORE = 1_000_000_000


@dataclass
class Translated:
    """Arguments in the words of TrainConfig.

    Attributes:
      values: {setting: value}, checked one by one.
      for_trainer: {argument: value} of FOR_TRAINER.
      each_epoch: the settings that shall be one epoch's number of steps.
    """

    values: dict[str, Any] = field(default_factory=dict)
    for_trainer: dict[str, Any] = field(default_factory=dict)
    each_epoch: tuple[str, ...] = ()


class SFTConfig:
    """The settings of an SFTTrainer.

    Takes every setting of `python -m fastjax.train --help` but those that the model and the data bring, with the same
    defaults; and in TRL's words max_length, bf16, fp16, gradient_checkpointing, assistant_only_loss, max_steps=-1,
    optim="adamw_torch", dataset_text_field, and save_strategy, eval_strategy and logging_strategy.

    Raises: UserError with a line for each argument that is unknown, or that this release cannot honour.
    """

    def __init__(self, output_dir: str = "trainer_output", **arguments: Any) -> None:
        found = translate({"output_dir": str(output_dir), **arguments})
        self.given, self.for_trainer, self.each_epoch = found.values, found.for_trainer, found.each_epoch
        self.train_config = TrainConfig(**self.given)

    def __repr__(self) -> str:
        return f"SFTConfig({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


def translate(arguments: Mapping[str, Any]) -> Translated:
    """Arguments in TRL's and HF's words as settings. Raises: UserError with a line for each that cannot be."""
    own, out, wrong = field_types(TrainConfig), Translated(), []
    said_by: dict[str, str] = {}

    def put(name: str, values: Mapping[str, Any]) -> None:
        for setting, value in _checked(values).items():
            if out.values.get(setting, value) != value:
                other = said_by[setting]
                raise UserError(
                    f"{name}={arguments[name]!r} and {other}={arguments[other]!r} contradict each other: "
                    f"both set {setting}; leave one of the two out"
                )
            out.values[setting], said_by[setting] = value, name

    arguments = {"eval_strategy" if name == "evaluation_strategy" else name: v for name, v in arguments.items()}
    for name, value in arguments.items():
        if name in CHANGE_NOTHING or (name in _STRATEGIES):
            continue
        try:
            if name in SFT_CONFIG:
                wrong += complaints("SFTConfig", SFT_CONFIG, {name: value})
            elif name in _TRANSLATED:
                put(name, _TRANSLATED[name](value))
            elif name in _BROUGHT:
                raise UserError(f"{name}={value!r} is no argument of SFTConfig; {_where(name)}")
            elif name in own:
                put(name, {name: value})
            elif name not in FOR_TRAINER:
                known = (*own, *_TRANSLATED, *_STRATEGIES, *FOR_TRAINER, *CHANGE_NOTHING)
                wrong += complaints("SFTConfig", SFT_CONFIG, {name: value}, known)
        except UserError as error:
            wrong.append(str(error))
    for name in _STRATEGIES:
        if name in arguments:
            try:
                _apply_strategy(name, arguments[name], arguments, out)
            except UserError as error:
                wrong.append(str(error))
    raise_all(wrong)
    out.for_trainer = {name: arguments[name] for name in FOR_TRAINER if arguments.get(name) is not None}
    if out.for_trainer.get("fp16") is False and "bf16" not in out.for_trainer:
        del out.for_trainer["fp16"]
    tell_ignored({name: value for name, value in arguments.items() if name in CHANGE_NOTHING})
    return out


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    hints = field_types(TrainConfig)
    return {name: check(name, hints[name], value, rule_of(TrainConfig, name)) for name, value in values.items()}


def _where(name: str) -> str:
    if name in ("data", "eval_data"):
        return "give the rows to SFTTrainer, as train_dataset and eval_dataset"
    if name in ("model", "dtype"):
        return "give it to FastLanguageModel.from_pretrained"
    if name in PLACE_SETTINGS:
        return "several processes are started with python -m fastjax.train"
    if name in ("inspect", "html"):
        return "call trainer.inspect(num_rows, html=...)"
    if name == "sample_prompt":
        return "call model.generate before and after training"
    return "the adapters are set in FastLanguageModel.get_peft_model"


def _apply_strategy(name: str, strategy: Any, arguments: Mapping[str, Any], out: Translated) -> None:
    """save_, eval_ and logging_strategy, which say when; how often is *_steps."""
    steps = _STRATEGIES[name]
    strategy = str(getattr(strategy, "value", strategy))
    if strategy in ("no", "epoch") and arguments.get(steps) is not None:
        raise UserError(f"{steps}={arguments[steps]} with {name}={strategy!r}; leave one of the two out")
    if strategy == "epoch":
        out.each_epoch += (steps,)
    elif strategy == "steps" and name == "eval_strategy" and arguments.get(steps) is None:
        # As in transformers: as often as it logs.
        out.values[steps] = out.values.get("logging_steps", _HF_LOGGING_STEPS)
    elif strategy == "no" and name == "save_strategy":
        # The end is always saved.
        out.values[steps] = _NO_CHECKPOINT_BEFORE
    elif strategy == "no" and name == "logging_strategy":
        raise UserError("logging_strategy='no' cannot be honoured: metrics.jsonl is always written; set logging_steps")
    elif strategy not in ("no", "steps"):
        ways = "'steps' or 'epoch'" if name == "logging_strategy" else "'no', 'steps' or 'epoch'"
        raise UserError(f"{name}={strategy!r} cannot be honoured; use {ways}")


def _max_length(value: Any) -> dict[str, Any]:
    if value is None:
        raise UserError("max_length=None cannot be honoured: rows need a bound; give a number of tokens")
    return {"max_seq_length": value}


def _max_steps(value: Any) -> dict[str, Any]:
    return {"max_steps": None if value == -1 else value}


def _optim(value: Any) -> dict[str, Any]:
    value = getattr(value, "value", value)
    if value in _EIGHT_BIT:
        return {"optim": "adamw_8bit"}
    return {"optim": "adamw" if value in _SAME_OPTIMIZER else value}


def _gradient_checkpointing(value: Any) -> dict[str, Any]:
    if value == "unsloth":
        return {"remat": "full"}
    if not isinstance(value, bool):
        raise UserError(f"gradient_checkpointing={value!r} is not true or false; for a policy, say remat='full'")
    return {"remat": "full" if value else "none"}


def _assistant_only_loss(value: Any) -> dict[str, Any]:
    # False is TRL's default, where completion_only_loss then decides; it does not ask for a loss on everything.
    return {"train_on": "responses"} if value else {}


def _completion_only_loss(value: Any) -> dict[str, Any]:
    return {} if value is None else {"train_on": "responses" if value else "all"}


def _report_to(value: Any) -> dict[str, Any]:
    if isinstance(value, list | tuple):
        if len(value) > 1:
            raise UserError(f"report_to={value!r}: one of tensorboard, wandb, none at a time")
        value = value[0] if value else "none"
    return {"report_to": "none" if value is None else value}


def _metric_for_best_model(value: Any) -> dict[str, Any]:
    return {} if value is None else {"metric_for_best_model": value}


_TRANSLATED = {
    "chat_template_path": lambda value: {"chat_template": value},
    "metric_for_best_model": _metric_for_best_model,
    "max_length": _max_length,
    "max_steps": _max_steps,
    "optim": _optim,
    "gradient_checkpointing": _gradient_checkpointing,
    "assistant_only_loss": _assistant_only_loss,
    "completion_only_loss": _completion_only_loss,
    "report_to": _report_to,
}

"""SFTConfig: a training run's settings under the names that TRL and HF TrainingArguments users type."""

from collections.abc import Mapping
from typing import Any

from fastjax.errors import UserError
from fastjax.refusals import SFT_CONFIG, refuse
from fastjax.settings import build, field_types
from fastjax.train.config import LORA_SETTINGS, TrainConfig

# Settings of a run that the model and the data of a trainer bring with them.
_BROUGHT = ("model", "data", "eval_data", "sample_prompt", "method", "dtype", *LORA_SETTINGS)

_SAME_OPTIMIZER = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf")


class SFTConfig:
    """The settings of an SFTTrainer.

    Takes every setting of `python -m fastjax.train --help` but those that the model and the data bring, with the same
    defaults; and in TRL's words max_length, bf16, gradient_checkpointing, assistant_only_loss, eval_strategy,
    max_steps=-1 and optim="adamw_torch".

    Raises: UserError for an argument that is unknown, or that this release cannot honour.
    """

    def __init__(self, output_dir: str = "trainer_output", **arguments: Any) -> None:
        self.given = translate({"output_dir": str(output_dir), **arguments})
        self.train_config = build(TrainConfig, self.given)

    def __repr__(self) -> str:
        return f"SFTConfig({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


def translate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """{setting of TrainConfig: value} for arguments in TRL's and HF's words. Raises: UserError."""
    own = field_types(TrainConfig)
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in SFT_CONFIG:
            refuse("SFTConfig", SFT_CONFIG, {name: value})
        elif name in _TRANSLATED:
            values.update(_TRANSLATED[name](value))
        elif name in _BROUGHT:
            raise UserError(f"{name}={value!r} is no argument of SFTConfig; {_where(name)}")
        elif name in own:
            values[name] = value
        else:
            refuse("SFTConfig", SFT_CONFIG, {name: value}, known=(*own, *_TRANSLATED))
    if arguments.get("eval_strategy") == "no" and "eval_steps" in values:
        raise UserError(f"eval_steps={values['eval_steps']} with eval_strategy='no'; leave one of the two out")
    return values


def _where(name: str) -> str:
    if name in ("data", "eval_data"):
        return "give the rows to SFTTrainer, as train_dataset and eval_dataset"
    if name in ("model", "dtype"):
        return "give it to FastLanguageModel.from_pretrained"
    return "the adapters are set in FastLanguageModel.get_peft_model"


def _max_length(value: Any) -> dict[str, Any]:
    if value is None:
        raise UserError("max_length=None cannot be honoured: rows need a bound; give a number of tokens")
    return {"max_seq_length": value}


def _max_steps(value: Any) -> dict[str, Any]:
    return {"max_steps": None if value == -1 else value}


def _optim(value: Any) -> dict[str, Any]:
    return {"optim": "adamw" if value in _SAME_OPTIMIZER else value}


def _bf16(value: Any) -> dict[str, Any]:
    if value is False:
        raise UserError("bf16=False: the dtype is the model's; load it with dtype='float32'")
    return {}


def _gradient_checkpointing(value: Any) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise UserError(f"gradient_checkpointing={value!r} is not true or false; for a policy, say remat='full'")
    return {"remat": "full" if value else "none"}


def _assistant_only_loss(value: Any) -> dict[str, Any]:
    return {"train_on": "responses" if value else "all"}


def _eval_strategy(value: Any) -> dict[str, Any]:
    if value not in ("no", "steps"):
        raise UserError(f"eval_strategy={value!r} cannot be honoured; use 'steps' with eval_steps")
    return {}


def _report_to(value: Any) -> dict[str, Any]:
    if isinstance(value, list | tuple):
        if len(value) > 1:
            raise UserError(f"report_to={value!r}: one of tensorboard, wandb, none at a time")
        value = value[0] if value else "none"
    return {"report_to": value}


_TRANSLATED = {
    "max_length": _max_length,
    "max_steps": _max_steps,
    "optim": _optim,
    "bf16": _bf16,
    "gradient_checkpointing": _gradient_checkpointing,
    "assistant_only_loss": _assistant_only_loss,
    "completion_only_loss": _assistant_only_loss,
    "eval_strategy": _eval_strategy,
    "report_to": _report_to,
}

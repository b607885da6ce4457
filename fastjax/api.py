"""The face that notebooks use, under the names that Unsloth and TRL users type.

model, tokenizer = FastLanguageModel.from_pretrained("folder-or-id", max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=16)
trainer = SFTTrainer(model, tokenizer, train_dataset=rows, args=SFTConfig(output_dir="run"))
trainer.train()
model.save_pretrained("adapter")
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.devices import choose_platform
from fastjax.errors import UserError
from fastjax.language_model import LanguageModel
from fastjax.refusals import FROM_PRETRAINED, GET_PEFT_MODEL, TRAINER, refuse
from fastjax.sft_config import SFTConfig
from fastjax.train.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from fastjax.train.run import RunResult

Rows = str | Path | Iterable[Mapping[str, Any]]

_ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DTYPES = ("bfloat16", "float32")


class FastLanguageModel:
    """Loads models and gives them adapters; its functions are static, as Unsloth's are."""

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int = 2048,
        dtype: Any = None,
        load_in_4bit: bool = False,
        revision: str | None = None,
        **arguments: Any,
    ) -> tuple[LanguageModel, "PreTrainedTokenizerFast"]:
        """A model and its tokenizer; an adapter folder gives its base model with the adapter on it.

        Args:
          model_name: HF folder, hub id, .gguf file, or the folder of an adapter.
          max_seq_length: longest row in tokens, for training and generation.
          dtype: bfloat16 (None too) or float32, as a name or as numpy's, jax's or torch's dtype.
          load_in_4bit: not in this release.
        Raises: UserError for a model that is missing or unsound, and for arguments that cannot be honoured.
        """
        if load_in_4bit:
            raise UserError("load_in_4bit=True: 4-bit bases are not in this release; leave it out for a 16-bit base")
        refuse("from_pretrained", FROM_PRETRAINED, arguments, ("model_name", "max_seq_length", "dtype", "revision"))
        name = "bfloat16" if dtype is None else _dtype_name(dtype)
        choose_platform()
        from fastjax.models.checkpoint.load import load_model
        from fastjax.models.peft_io import load_adapter
        from fastjax.train.parts import base_of_adapter, open_base

        adapter = model_name if (Path(model_name) / "adapter_config.json").is_file() else None
        base = open_base(base_of_adapter(adapter) if adapter else model_name, adapter, revision)
        if max_seq_length < 2:
            raise UserError(f"max_seq_length={max_seq_length} is too small; it must be 2 or more")
        model = LanguageModel(load_model(base.checkpoint, name), base, max_seq_length)
        if adapter:
            model.lora = load_adapter(model.model, adapter)
        return model, base.tokenizer

    @staticmethod
    def get_peft_model(
        model: LanguageModel,
        r: int = 16,
        target_modules: Sequence[str] | str = _ALL_PROJECTIONS,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        layers_to_transform: Sequence[int] | int | None = None,
        layers_pattern: Sequence[str] | str | None = None,
        use_gradient_checkpointing: bool | str = "unsloth",
        random_state: int = 3407,
        use_rslora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        init_lora_weights: bool | str = True,
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
        **arguments: Any,
    ) -> LanguageModel:
        """The same model with fresh adapters, in PEFT's meaning of every argument.

        Args:
          use_gradient_checkpointing: True or "unsloth" recomputes all but the layers' inputs in the backward pass,
            False nothing; or the name of a policy: none, full, attention, no_matmul.
          random_state: seed of the adapters.
        Raises: UserError for settings that fit no module, or cannot be honoured.
        """
        refuse("get_peft_model", GET_PEFT_MODEL, arguments)
        import jax

        from fastjax.models.lora import LoraConfig, apply_lora

        remat = _remat(use_gradient_checkpointing)
        lora = LoraConfig(
            r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, bias=bias, target_modules=target_modules,
            layers_to_transform=layers_to_transform, layers_pattern=layers_pattern, use_rslora=use_rslora,
            modules_to_save=modules_to_save, init_lora_weights=init_lora_weights, rank_pattern=rank_pattern or {},
            alpha_pattern=alpha_pattern or {},
        )  # fmt: skip
        apply_lora(model.model, lora, jax.random.key(random_state))
        model.lora, model.remat, model.seed = lora, remat, random_state
        return model

    @staticmethod
    def for_inference(model: LanguageModel) -> LanguageModel:
        """The model itself: generation is always the fast path."""
        return model

    @staticmethod
    def for_training(model: LanguageModel) -> LanguageModel:
        """The model itself: nothing was changed for generation."""
        return model


class SFTTrainer:
    """Supervised fine-tuning of a model's adapter, or of every weight of a model without one.

    Args:
      model: from FastLanguageModel; it is trained in place.
      tokenizer: the model's own where None; `processing_class` is TRL's newer name for it.
      train_dataset: rows as dicts, a `datasets.Dataset`, or a file's path.
      eval_dataset: the same, for the evaluation loss.
      args: the run's settings.
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
        **arguments: Any,
    ) -> None:
        refuse("SFTTrainer", TRAINER, arguments)
        if not isinstance(model, LanguageModel):
            raise UserError(f"model is a {type(model).__name__}; give what FastLanguageModel.from_pretrained returned")
        if tokenizer is not None and processing_class is not None:
            raise UserError("tokenizer and processing_class are two names for one thing; give one")
        if train_dataset is None:
            raise UserError("train_dataset is missing; give rows as dicts, a datasets.Dataset or a file's path")
        from fastjax.train.parts import load_rows

        self.model = model
        self.args = args or SFTConfig()
        self.base = dataclasses.replace(model.base, tokenizer=tokenizer or processing_class or model.base.tokenizer)
        self.config = self._config(max_seq_length, train_dataset, eval_dataset)
        self.config.validate()
        self.train_rows = load_rows(_source(train_dataset), self.config, self.base)
        self.eval_rows = None if eval_dataset is None else load_rows(_source(eval_dataset), self.config, self.base)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> "RunResult":
        """Train to the end, and leave the run's folder as the command line does.

        Args:
          resume_from_checkpoint: True goes on from the newest checkpoint in output_dir, a path from that one.
        """
        from fastjax.train.run import train_model

        config = self.config
        if resume_from_checkpoint:
            resume = "auto" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            config = dataclasses.replace(config, resume=resume)
            config.validate()
        model = self.model
        return train_model(config, self.base, model.model, model.lora, self.train_rows, self.eval_rows)

    def evaluate(self) -> dict[str, float]:
        """{eval_loss, perplexity, num_target_tokens} over the evaluation rows."""
        import math

        from fastjax.train.mesh import make_mesh
        from fastjax.train.parts import evaluate_model

        if self.eval_rows is None:
            raise UserError("there are no evaluation rows; give eval_dataset to SFTTrainer")
        mesh = make_mesh(self.config.data_parallel_size)
        result = evaluate_model(self.model.model, self.eval_rows, self.config.per_device_eval_batch_size, mesh)
        perplexity = math.exp(result.loss) if result.loss < 700 else math.inf
        return {"eval_loss": result.loss, "perplexity": perplexity, "num_target_tokens": result.num_target_tokens}

    def save_model(self, output_dir: str | Path) -> None:
        """Write the adapter, or the whole model where there is none."""
        self.model.save_pretrained(output_dir, self.base.tokenizer)

    def _config(self, max_seq_length: int | None, train: Rows, evaluation: Rows | None) -> TrainConfig:
        """The arguments as the settings of a run, with what the model brings."""
        from fastjax.train.parts import settings_of

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
        )  # fmt: skip


def _source(rows: Rows) -> Any:
    return str(rows) if isinstance(rows, Path) else rows


def _dtype_name(dtype: Any) -> str:
    import numpy as np

    name = str(dtype).rpartition(".")[2] if isinstance(dtype, str) or "torch" in str(dtype) else np.dtype(dtype).name
    if name == "float16":
        raise UserError(
            "dtype=float16: there is no loss scaling here, so float16 gradients underflow, and every supported card "
            "has bfloat16; use dtype=None"
        )
    if name not in _DTYPES:
        raise UserError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}")
    return name


def _remat(use_gradient_checkpointing: bool | str) -> str:
    from fastjax.settings import check, field_types, rule_of

    if use_gradient_checkpointing in (True, "unsloth"):
        return "full"
    if use_gradient_checkpointing is False:
        return "none"
    try:
        hint = field_types(TrainConfig)["remat"]
        return check("use_gradient_checkpointing", hint, use_gradient_checkpointing, rule_of(TrainConfig, "remat"))
    except UserError as error:
        raise UserError(f"{error}, True, False or 'unsloth'") from None

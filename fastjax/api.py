"""FastLanguageModel, under the names that Unsloth users type.

model, tokenizer = FastLanguageModel.from_pretrained("folder-or-id", max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=16)
trainer = SFTTrainer(model, tokenizer, train_dataset=rows, args=SFTConfig(output_dir="run"))
trainer.train()
model.save_pretrained("adapter")
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.devices import choose_platform
from fastjax.errors import UserError
from fastjax.face.language_model import LanguageModel
from fastjax.face.refusals import FROM_PRETRAINED, GET_PEFT_MODEL, note, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from fastjax.models.lora import LoraConfig

_ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DTYPES = ("bfloat16", "float32")


class FastLanguageModel:
    """Loads models and gives them adapters; its functions are static, as Unsloth's are."""

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int = 2048,
        dtype: Any = None,
        load_in_4bit: bool | None = None,
        revision: str | None = None,
        quantization_config: Any = None,
        **arguments: Any,
    ) -> tuple[LanguageModel, "PreTrainedTokenizerFast"]:
        """A model and its tokenizer; an adapter folder gives its base model with the adapter on it.

        Args:
          model_name: HF folder, hub id, .gguf file, or the folder of an adapter.
          max_seq_length: longest row in tokens, for training.
          dtype: bfloat16 (None too) or float32, as a name or as numpy's, jax's or torch's dtype.
          load_in_4bit: quantise the linear layers to 4 bit while they load. None does so for a base model, and for an
            adapter's folder what the adapter was trained with. A model that is 4-bit on disk stays so.
          quantization_config: transformers' BitsAndBytesConfig or its settings as a dict: bnb_4bit_quant_type,
            bnb_4bit_use_double_quant, llm_int8_skip_modules; None is NF4 with double quantisation.
        Raises: UserError for a model that is missing or unsound, and for arguments that cannot be honoured.
        """
        refuse("from_pretrained", FROM_PRETRAINED, arguments, ("model_name", "max_seq_length", "dtype", "revision"))
        load_in_4bit = _four_bit(load_in_4bit, quantization_config, arguments)
        name = "bfloat16" if dtype is None else _dtype_name(dtype)
        choose_platform()
        from fastjax.face.quantization import read_quantization
        from fastjax.models.base_form import BaseForm, read_base_form
        from fastjax.models.checkpoint.load import load_model
        from fastjax.models.peft_io import load_adapter
        from fastjax.train.parts import base_of_adapter, open_base

        adapter = model_name if (Path(model_name) / "adapter_config.json").is_file() else None
        base = open_base(base_of_adapter(adapter) if adapter else model_name, adapter, revision)
        _check_length(max_seq_length)
        form = (read_base_form(adapter) if adapter else None) or BaseForm()
        quantization = read_quantization(
            load_in_4bit, quantization_config, base.checkpoint, form.quantization, is_adapter=adapter is not None
        )
        loaded = load_model(base.checkpoint, name, quantization=quantization, quantize_from=form.dtype)
        model = LanguageModel(loaded, base, max_seq_length, quantization or base.checkpoint.quantization)
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
        max_seq_length: int | None = None,
        **arguments: Any,
    ) -> LanguageModel:
        """The same model with fresh adapters, in PEFT's meaning of every argument.

        A model that has an adapter of the same settings is returned as it is, so that a cell can run twice.

        Args:
          use_gradient_checkpointing: "auto" or "unsloth" recomputes in the backward pass what the memory has no room
            for, True all but the layers' inputs, False nothing; or a policy, see `fastjax.models.remat`.
          random_state: seed of the adapters.
          max_seq_length: longest row in tokens, for training; None keeps the model's.
        Raises: UserError for a model that has another adapter, and for settings that fit no module or cannot be
          honoured.
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
        _check_length(max_seq_length)
        if model.lora is not None:
            _check_same_adapter(model, lora, random_state)
            note("the model has an adapter of these settings already; it stays as it is, with what it has learned")
        else:
            apply_lora(model.model, lora, jax.random.key(random_state))
            model.lora, model.seed = lora, random_state
            if model.merged:
                note(
                    f"an adapter was merged into this model, and the new one will name {model.base.checkpoint.name} as "
                    "its base; save the merged model with save_pretrained and load that folder instead"
                )
        model.remat = remat
        model.max_seq_length = max_seq_length or model.max_seq_length
        return model

    @staticmethod
    def for_inference(model: LanguageModel) -> LanguageModel:
        """The model itself: generation is always the fast path."""
        return model

    @staticmethod
    def for_training(model: LanguageModel) -> LanguageModel:
        """The model itself: nothing was changed for generation."""
        return model


def is_bfloat16_supported() -> bool:
    """True: every device that jax runs on computes bfloat16."""
    return True


def _four_bit(load_in_4bit: Any, quantization_config: Any, arguments: Mapping[str, Any]) -> bool | None:
    """load_in_4bit as it follows from the other arguments. Raises: UserError for ones that contradict it."""
    if load_in_4bit is not None and not isinstance(load_in_4bit, bool):
        raise UserError(f"load_in_4bit={load_in_4bit!r} must be True, False or None")
    for name in ("load_in_16bit", "full_finetuning"):
        if not arguments.get(name):
            continue
        if load_in_4bit or quantization_config is not None:
            other = "load_in_4bit=True" if load_in_4bit else "a quantization_config"
            raise UserError(f"{name}=True with {other}; leave one of the two out")
        load_in_4bit = False
    return load_in_4bit


def _check_length(max_seq_length: int | None) -> None:
    if max_seq_length is not None and max_seq_length < 2:
        raise UserError(f"max_seq_length={max_seq_length} is too small; it must be 2 or more")


def _check_same_adapter(model: LanguageModel, lora: "LoraConfig", random_state: int) -> None:
    """Raises: UserError naming the first setting in which the model's adapter differs."""
    from fastjax.models.lora_config import plan_adapter

    assert model.lora is not None
    old, new = (
        {**vars(config), "random_state": seed} for config, seed in ((model.lora, model.seed), (lora, random_state))
    )
    plans = [plan_adapter(config, model.model, strict=False) for config in (model.lora, lora)]
    # One set of modules has many spellings: all-linear, a list in any order, an expression.
    same_modules = set(plans[0].targets) == set(plans[1].targets) and set(plans[0].trained) == set(plans[1].trained)
    names = ["lora_dropout", "init_lora_weights", "random_state"] if same_modules else list(new)
    if model.seed is None:
        names.remove("random_state")
    for name in names:
        if new[name] != old[name]:
            raise UserError(
                f"{name}={new[name]!r}, and the model has an adapter with {old[name]!r}; to have another adapter, fold "
                "the old one into the weights with model.merge_and_unload(), or load the base again by from_pretrained"
            )


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
    from fastjax.models.remat import parse_plan

    if use_gradient_checkpointing in ("auto", "unsloth"):
        return "auto"
    if use_gradient_checkpointing is True:
        return "full"
    if use_gradient_checkpointing is False:
        return "none"
    try:
        parse_plan(str(use_gradient_checkpointing))
    except UserError as error:
        raise UserError(f"use_gradient_checkpointing={use_gradient_checkpointing!r}: {error}; or True, False") from None
    return str(use_gradient_checkpointing)

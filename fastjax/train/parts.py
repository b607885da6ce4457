"""The parts that commands put together: an opened base model, its tokenizer, rows, adapters."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastjax.errors import UserError
from fastjax.models.checkpoint.checkpoint import Checkpoint
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.checkpoint.tokenizer import load_tokenizer
from fastjax.models.config import ModelConfig
from fastjax.models.values import token_ids
from fastjax.train.config import LORA_SETTINGS, QUANT_SETTINGS, TrainConfig, default_of

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from transformers import PreTrainedTokenizerFast

    from fastjax.models.base_form import BaseForm
    from fastjax.models.decoder import CausalLM
    from fastjax.models.lora import LoraConfig
    from fastjax.train.data import Dataset
    from fastjax.train.evaluate import EvalResult


@dataclass(frozen=True)
class Base:
    """A base model whose headers are read and whose weights are not."""

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: "PreTrainedTokenizerFast"


def open_base(model: str, adapter: str | None = None, revision: str | None = None) -> Base:
    """The base model, with the tokenizer that its adapter was trained with if the adapter's folder holds one.

    Raises: UserError for a missing or unsound model, tokenizer or adapter folder.
    """
    checkpoint = open_checkpoint(model, revision)
    config = ModelConfig.from_hf(checkpoint.config)
    source: Any = checkpoint
    if adapter is not None:
        folder = adapter_folder(adapter)
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            source = folder
    return Base(checkpoint, config, load_tokenizer(source))


def adapter_folder(adapter: str) -> Path:
    """The folder that holds adapter_config.json. Raises: UserError if it does not."""
    folder = Path(adapter).expanduser()
    if (folder / "adapter_config.json").is_file():
        return folder
    if (folder / "adapter" / "adapter_config.json").is_file():
        raise UserError(f"adapter={adapter!r} is the folder of a run; give {folder / 'adapter'}")
    raise UserError(f"adapter={adapter!r} has no adapter_config.json, so it is not an adapter folder")


def evaluate_model(model: "CausalLM", rows: "Dataset", batch_size: int, mesh: "Mesh") -> "EvalResult":
    """The mean loss of a target token over all rows, adapters included and dropout off.

    Args:
      batch_size: rows per data-parallel rank.
    """
    from flax import nnx

    from fastjax.models.host import place
    from fastjax.models.layers import LoraParam, TrainedParam
    from fastjax.train.data import eval_batches
    from fastjax.train.evaluate import evaluate
    from fastjax.train.mesh import frozen_shardings, num_batch_shards, trained_shardings
    from fastjax.train.step import make_eval_step

    graphdef, trainable, frozen = nnx.split(model, nnx.Any(LoraParam, TrainedParam), ...)  # type: ignore[misc]
    trainable = place(trainable, trained_shardings(model.config, mesh, trainable))
    frozen = place(frozen, frozen_shardings(model.config, mesh, frozen))
    with eval_batches(rows, batch_size * num_batch_shards(mesh)) as batches:
        result = evaluate(make_eval_step(graphdef, mesh=mesh), trainable, frozen, batches, mesh=mesh)
    assert result is not None, "an evaluation that nobody stops has a result"
    return result


def load_base(
    base: Base,
    dtype: str,
    *,
    mesh: "Mesh | None" = None,
    adapter: str | None = None,
    load_in_4bit: bool | None = None,
) -> "CausalLM":
    """The base model with its weights, and the adapter of that folder on it.

    Args:
      load_in_4bit: whether a 16-bit base is quantised; None does what the adapter was trained with, which its file
        says.
    Raises: UserError for load_in_4bit=False with a base that is 4-bit on disk, and what loading raises.
    """
    from fastjax.models.checkpoint.load import load_model
    from fastjax.models.peft_io import load_adapter

    if load_in_4bit is False and base.checkpoint.quantization is not None:
        raise UserError(
            f"load_in_4bit=False, and {base.checkpoint.name} holds 4-bit weights; leave it out, or give the 16-bit "
            "model"
        )
    form = form_of_base(adapter, load_in_4bit)
    if load_in_4bit is None and form.quantization is not None and base.checkpoint.quantization is None:
        print(
            "note: the base is read in 4 bit, as the adapter was trained; --no_load_in_4bit keeps 16", file=sys.stderr
        )
    model = load_model(base.checkpoint, dtype, mesh, quantization=form.quantization, quantize_from=form.dtype)
    if adapter is not None:
        load_adapter(model, adapter)
    return model


def form_of_base(adapter: str | None, load_in_4bit: bool | None) -> "BaseForm":
    """How a 16-bit base is read that is to be used and not trained; a 4-bit one stays as it is.

    Args:
      load_in_4bit: None does what the adapter was trained with.
    """
    from fastjax.models.base_form import BaseForm, read_base_form
    from fastjax.models.quant_config import QuantConfig

    trained_over = (None if adapter is None else read_base_form(adapter)) or BaseForm()
    quantization = trained_over.quantization if load_in_4bit is not False else None
    if load_in_4bit and quantization is None:
        quantization = QuantConfig()
    return BaseForm(quantization, trained_over.dtype)


def quantization_settings(
    config: TrainConfig, base: Base, given: frozenset[str] = frozenset()
) -> "tuple[TrainConfig, BaseForm]":
    """The run's settings with what its base or its adapter says of 4-bit weights, and how the base is read.

    A base that is 4-bit on disk stays as it is, and an adapter goes on over a base like the one it was trained over:
    over 16-bit weights by method=lora, unless another method was given.

    Args:
      given: names of the settings that the user gave: one that differs is refused rather than ignored.
    Returns: (config, form); a form without quantization reads weights as they lie on disk.
    Raises: UserError for a 4-bit base with another method than qlora, or settings that contradict it or the adapter.
    """
    from fastjax.models.base_form import BaseForm, read_base_form
    from fastjax.models.quant_config import QuantConfig

    on_disk = base.checkpoint.quantization
    if config.method != "qlora":
        if on_disk is not None:
            raise UserError(
                f"method={config.method} trains over 16-bit weights, and {config.model} holds 4-bit ones; use "
                "method=qlora, or give the 16-bit model"
            )
        return config, BaseForm()
    have, whose = on_disk, f"{config.model} is 4-bit already, with"
    form = None if on_disk or config.adapter is None else read_base_form(adapter_folder(config.adapter))
    if form is not None:
        have, whose = form.quantization, f"the adapter in {config.adapter} was trained over a base with"
        if have is None and not given & {"method", *QUANT_SETTINGS}:
            print(
                "note: the adapter was trained over 16-bit weights, so method=lora; --method qlora quantises them",
                file=sys.stderr,
            )
            return replace(config, method="lora"), form
    if have is not None:
        own: dict[str, Any] = dict(
            zip(QUANT_SETTINGS, (have.quant_type, have.double_quant, have.skip_modules or None), strict=True)
        )
        for name, theirs in own.items():
            value = getattr(config, name)
            if value is not None and value != theirs and (name in given or value != default_of(name)):
                raise UserError(f"{name}={value!r}, and {whose} {theirs!r}; leave {name} out")
        config = replace(config, **own)
    if on_disk is not None:
        return config, BaseForm()
    skipped = config.llm_int8_skip_modules or ()
    quantization = QuantConfig(config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, skipped)
    return config, BaseForm(quantization, form.dtype if form else None)


def lora_settings(config: TrainConfig, given: frozenset[str] = frozenset()) -> tuple[TrainConfig, "LoraConfig | None"]:
    """The run's settings with those of the adapter it goes on from, and the LoraConfig; None trains every weight.

    Args:
      given: names that the user gave: one that differs from the adapter's own is refused rather than ignored.
    Raises: UserError for an adapter that cannot be read, or a setting that contradicts it.
    """
    from fastjax.models.checkpoint.files import read_json
    from fastjax.models.lora import LoraConfig
    from fastjax.models.peft_config import config_from_peft

    if config.method == "full":
        return config, None
    if config.adapter is None:
        alpha = config.lora_alpha
        same = {name: getattr(config, name) for name in LORA_SETTINGS[3:]}
        return config, LoraConfig(r=config.lora_r, lora_alpha=int(alpha) if alpha == int(alpha) else alpha, **same)
    file = adapter_folder(config.adapter) / "adapter_config.json"
    lora = config_from_peft(read_json(file), file)
    own: dict[str, Any] = {}
    for name in LORA_SETTINGS[1:]:
        value, theirs = getattr(config, name), getattr(lora, "r" if name == "lora_r" else name)
        if value != theirs and (name in given or value != default_of(name)):
            raise UserError(
                f"{name}={value!r}, and the adapter in {config.adapter} has {theirs!r}; "
                f"leave {name} out to go on from it"
            )
        own[name] = theirs
    return replace(config, **own), lora


def check_targets(lora: "LoraConfig", config: ModelConfig, *, strict: bool = True) -> None:
    """Raises: UserError if the settings fit no module of the model; no weight is needed to see it."""
    from fastjax.models.decoder import CausalLM
    from fastjax.models.lora_config import plan_adapter

    plan_adapter(lora, CausalLM.abstract(config), strict=strict)


def settings_of(lora: "LoraConfig | None") -> dict[str, Any]:
    """A LoraConfig under the names of the run's settings; nothing for None. The method is left to the caller."""
    if lora is None:
        return {}
    return {name: getattr(lora, "r" if name == "lora_r" else name) for name in LORA_SETTINGS[1:]}


def base_of_adapter(adapter: str) -> str:
    """The base model that an adapter folder names. Raises: UserError if it names none."""
    from fastjax.models.checkpoint.files import read_json

    file = adapter_folder(adapter) / "adapter_config.json"
    name = read_json(file).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{file} has no base_model_name_or_path; load the base model, and the adapter by --adapter")
    return name


def eos_token_ids(base: Base) -> tuple[int, ...]:
    """Every token that ends an answer: those of generation_config, of config.json, and the tokenizer's.

    Raises: UserError for one in generation_config that is no id of the vocabulary.
    """
    stated = (base.checkpoint.generation_config or {}).get("eos_token_id")
    # A GGUF file makes its own generation_config, which open_checkpoint has not compared with the vocabulary.
    found = token_ids(stated, f"{base.checkpoint.name}: eos_token_id", base.config.vocab_size)
    own = base.tokenizer.eos_token_id
    return tuple(dict.fromkeys((*found, *base.config.eos_token_id, *(() if own is None else (own,)))))


def answer(model: "CausalLM", base: Base, prompts: list[Any], **sampling: Any) -> list[str]:
    """The model's answers as text, without special tokens.

    Args:
      prompts: see `prompt_rows`.
      sampling: as `fastjax.models.generation.generate` takes it.
    """
    from fastjax.models.generation import generate

    new = generate(model, prompt_rows(base, prompts), eos_token_ids=eos_token_ids(base), **sampling)
    return [str(base.tokenizer.decode(row, skip_special_tokens=True)) for row in new]


def prompt_rows(base: Base, prompts: list[Any]) -> list[list[int]]:
    """The token ids that answers start from.

    Args:
      prompts: strings or lists of messages; a string is one user message where the tokenizer has a chat template.
    """
    from fastjax.train.data import prompt_ids

    chat = bool(base.tokenizer.chat_template)
    return [prompt_ids(base.tokenizer, prompt, chat or not isinstance(prompt, str)) for prompt in prompts]


def model_of(model: str, adapter: str | None) -> str:
    """The base model that was named, else the one that the adapter's folder names."""
    if model or adapter is None:
        return model
    name = base_of_adapter(adapter)
    print(f"note: the base model is {name}, as {adapter} says; --model gives another", file=sys.stderr)
    return name

"""Arguments and names that Unsloth, PEFT and TRL users type and that change nothing here, or cannot be honoured."""

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from fastjax.errors import UserError

# {argument: (the values that change nothing, what to say about any other)}
Fixed = Mapping[str, tuple[tuple[Any, ...], str]]

FROM_PRETRAINED: Fixed = {
    "load_in_8bit": ((False, None), "8-bit weights are not in this release; load_in_4bit=True has 4-bit ones"),
    "load_in_16bit": ((True, False, None), ""),
    "full_finetuning": ((True, False, None), ""),
    "token": ((None,), "log in with `hf auth login`, or set HF_TOKEN"),
    "device_map": ((None, "auto", "sequential"), "jax's default device is used; choose it with JAX_PLATFORMS"),
    "rope_scaling": ((None,), "write it into the model's config.json"),
    "fix_tokenizer": ((True, False, None), ""),
    "trust_remote_code": ((False, None), "code from a model folder is never run"),
    "use_gradient_checkpointing": ((True, False, None, "unsloth"), "it is an argument of get_peft_model"),
    "resize_model_vocab": ((None,), "the vocabulary cannot be resized in this release"),
    "fast_inference": ((False, None), "generation is compiled by jax; leave it out"),
    "attn_implementation": ((None,), "attention is fastjax's own; leave it out"),
}

GET_PEFT_MODEL: Fixed = {
    "loftq_config": ((None, {}), "LoftQ is not in this release; leave it out"),
    "use_dora": ((False, None), "DoRA is not in this release; leave it out"),
    "target_parameters": ((None,), "name linear modules with target_modules"),
    "temporary_location": ((None, "_unsloth_temporary_saved_buffers"), "nothing is saved on the way; leave it out"),
    "qat_scheme": ((None,), "quantisation-aware training is not in this release; leave it out"),
    "task_type": (("CAUSAL_LM", None), "models here are causal language models"),
    "inference_mode": ((False, None), "an adapter is made to be trained"),
}

_LENGTH_BUCKETS = "it changes the order of the rows, which here are put in buckets by length already; leave it out"

TRAINER: Fixed = {
    "packing": ((False, None), "say SFTConfig(packing=True)"),
    "data_collator": ((None,), "targets follow from SFTConfig(train_on=...); leave it out"),
    "peft_config": ((None,), "give the settings to FastLanguageModel.get_peft_model"),
    "compute_metrics": ((None,), "the evaluation gives the loss; leave it out"),
    "callbacks": (
        (None, [], ()),
        "callbacks are not in this release; metrics.jsonl grows as the run goes on, and "
        "SFTConfig(early_stopping_patience=N, eval_steps=M) stops early",
    ),
    "optimizers": (((None, None), None), "choose with SFTConfig(optim=..., lr_scheduler_type=...)"),
    "model_init": ((None,), "give the model itself"),
    "dataset_kwargs": ((None, {}, {"skip_prepare_dataset": False}), "rows are always tokenised here; leave it out"),
}

SFT_CONFIG: Fixed = {
    "packing_strategy": (
        ("bfd", "ffd", None),
        "documents are packed first-fit, and none is cut in two but by long_rows='split'; leave it out",
    ),
    "padding_free": ((False, None), "packing=True pads next to nothing; leave it out"),
    "greater_is_better": ((False, None), "the best eval_loss is the lowest; leave it out"),
    "fp16": (
        (False, None),
        "there is no loss scaling here, so float16 gradients underflow; every supported card has bfloat16, leave it "
        "out",
    ),
    "fp16_full_eval": ((False, None), "the evaluation computes in the model's dtype; leave it out"),
    "dataset_kwargs": TRAINER["dataset_kwargs"],
    "do_train": ((True, None), "call trainer.train() or not"),
    "group_by_length": ((False, None), _LENGTH_BUCKETS),
    "neftune_noise_alpha": ((None,), "NEFTune is not in this release; leave it out"),
    "label_smoothing_factor": ((0, None), "label smoothing is not in this release; leave it out"),
    "lr_scheduler_kwargs": ((None, {}), "the schedules have no further settings; leave it out"),
    "optim_args": ((None, ""), "set adam_beta1, adam_beta2 and adam_epsilon"),
    "optim_target_modules": ((None, []), "GaLore and its like are not in this release; leave it out"),
    "dataloader_drop_last": ((False, None), "every row is trained on, in a short last batch too; leave it out"),
    "dataset_batch_size": ((1000, None), "rows are tokenised as they come; leave it out"),
    "auto_find_batch_size": ((False, None), "set per_device_train_batch_size"),
    "push_to_hub": ((False, None), "upload the saved folder with `hf upload`"),
    "deepspeed": ((None, ""), "spread the batch with mesh='data=N', the weights too with mesh='fsdp=N'"),
    "fsdp": ((None, "", [], False), "spread batch and weights with mesh='fsdp=N'"),
    "use_cpu": ((False, None), "set JAX_PLATFORMS=cpu before python starts"),
    "ignore_data_skip": ((False, None), "a resumed run goes on where it stopped; leave it out"),
}

# Arguments of SFTConfig and SFTTrainer that change no number of a run, whatever their value.
CHANGE_NOTHING = frozenset({
    "average_tokens_across_devices", "bf16_full_eval", "dataloader_num_workers", "dataloader_persistent_workers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_find_unused_parameters",
    "disable_tqdm", "do_eval", "eval_accumulation_steps", "eval_packing", "gradient_checkpointing_kwargs", "hub_token",
    "include_num_input_tokens_seen", "include_tokens_per_second", "log_level", "logging_dir", "logging_first_step",
    "logging_nan_inf_filter", "pad_to_multiple_of", "prediction_loss_only", "remove_unused_columns", "run_name",
    "save_safetensors", "skip_memory_metrics", "torch_compile", "torch_empty_cache_steps", "use_liger_kernel",
})  # fmt: skip

GENERATE: Fixed = {
    "use_cache": ((True, None), "decoding always uses the cache; leave it out"),
    "num_beams": ((1, None), "beam search is not in this release; leave it out"),
    "num_return_sequences": ((1, None), "give the prompt several times, with different seeds"),
    "repetition_penalty": ((1, None), "repetition penalties are not in this release; leave it out"),
    "no_repeat_ngram_size": ((0, None), "repetition penalties are not in this release; leave it out"),
    "length_penalty": ((1, None), "it belongs to beam search, which is not in this release; leave it out"),
    "early_stopping": ((False, None), "it belongs to beam search, which is not in this release; leave it out"),
    "typical_p": ((1, None), "typical sampling is not in this release; use top_p or min_p"),
    "min_new_tokens": ((0, None), "an answer ends with its first end token; leave it out"),
    "min_length": ((0, None), "an answer ends with its first end token; leave it out"),
    "stop_strings": ((None,), "cut the answer afterwards, or name tokens with eos_token_id"),
    "stopping_criteria": ((None, []), "the decoding loop is one compiled call; name tokens with eos_token_id"),
    "logits_processor": ((None, []), "the decoding loop is one compiled call; leave it out"),
    "generation_config": ((None,), "give its settings as arguments"),
    "return_dict_in_generate": ((False, None), "tokens are returned; leave it out"),
    "output_scores": ((False, None), "model(input_ids).logits gives the scores of given tokens"),
    "output_logits": ((False, None), "model(input_ids).logits gives the scores of given tokens"),
    "output_attentions": ((False, None), "attention weights are never held; leave it out"),
    "output_hidden_states": ((False, None), "they are not handed out; leave it out"),
    "synced_gpus": ((False, None), "leave it out"),
}

_FILES = "write a merged folder with save_pretrained_merged and convert it with llama.cpp's convert_hf_to_gguf.py"
_UPLOAD = "save it with save_pretrained or save_pretrained_merged and upload the folder with `hf upload`"
_NO_MODE = "there are no modes to switch: dropout acts in training only; leave it out"
_NO_DEVICE = "the model lies on jax's default device, which JAX_PLATFORMS chooses; leave it out"

MODEL_NAMES: Mapping[str, str] = {
    "save_pretrained_gguf": f"GGUF files are not written in this release; {_FILES}",
    "push_to_hub": f"nothing is uploaded from here; {_UPLOAD}",
    "push_to_hub_merged": f"nothing is uploaded from here; {_UPLOAD}",
    "push_to_hub_gguf": f"GGUF files are not written in this release; {_FILES}",
    "save_lora": "the adapter is written by save_pretrained",
    "load_lora": "give the adapter's folder to FastLanguageModel.from_pretrained",
    "load_adapter": "give the adapter's folder to FastLanguageModel.from_pretrained",
    "fast_generate": "generate is the fast path",
    "unload": "load the base model again, or merge_and_unload",
    "eval": _NO_MODE,
    "train": _NO_MODE,
    "gradient_checkpointing_enable": "say use_gradient_checkpointing in get_peft_model",
    "enable_input_require_grads": "leave it out",
    "to": _NO_DEVICE,
    "cuda": _NO_DEVICE,
    "cpu": _NO_DEVICE,
    "device": _NO_DEVICE,
    "half": "the dtype is chosen in FastLanguageModel.from_pretrained(dtype=...)",
    "float": "the dtype is chosen in FastLanguageModel.from_pretrained(dtype=...)",
    "bfloat16": "the dtype is chosen in FastLanguageModel.from_pretrained(dtype=...)",
    "parameters": "the weights are flax's: flax.nnx.state(model.model)",
    "named_parameters": "the weights are flax's: flax.nnx.state(model.model)",
    "state_dict": "the weights are flax's: flax.nnx.state(model.model)",
    "resize_token_embeddings": "the vocabulary cannot be resized in this release",
}

MODULE_NAMES: Mapping[str, str] = {
    "LoraConfig": "give its settings to FastLanguageModel.get_peft_model",
    "get_peft_model": "it is FastLanguageModel.get_peft_model",
    "get_chat_template": "the tokenizer's own template is used; to have another, set tokenizer.chat_template",
    "standardize_sharegpt": "rows of `conversations` are read as they are; leave it out",
    "to_sharegpt": "rows of `instruction`, `input`, `output` are read as they are; leave it out",
    "FastModel": "use FastLanguageModel",
    "FastLlamaModel": "use FastLanguageModel",
    "FastMistralModel": "use FastLanguageModel",
    "UnslothTrainer": "use SFTTrainer",
    "UnslothTrainingArguments": "use SFTConfig",
    "TrainingArguments": "use SFTConfig, which takes its arguments",
    "is_bf16_supported": "use is_bfloat16_supported",
}


class MissingName(UserError, AttributeError):
    """A name that people know from elsewhere and that is not here; hasattr() is False for it."""


def missing(owner: str, name: str, names: Mapping[str, str]) -> AttributeError:
    """The error for a name that `owner` does not have, with the way out where one is known."""
    if name in names:
        return MissingName(f"{owner} has no {name}: {names[name]}")
    return AttributeError(f"{owner} has no attribute {name!r}")


def refuse(function: str, fixed: Fixed, arguments: Mapping[str, Any], known: tuple[str, ...] = ()) -> None:
    """Pass arguments that change nothing.

    Args:
      function: the function's name, for the message.
      fixed: what is known of its arguments, one of the tables of this module.
      known: the arguments that it does honour, for a guess at a misspelt one.
    Raises: UserError with a line for each argument that is unknown, or has a value that cannot be honoured.
    """
    raise_all(complaints(function, fixed, arguments, known))


def complaints(function: str, fixed: Fixed, arguments: Mapping[str, Any], known: Iterable[str] = ()) -> list[str]:
    """What `refuse` says, a line for each argument."""
    found = []
    for name, value in arguments.items():
        if name not in fixed:
            near = difflib.get_close_matches(name, [*fixed, *known], n=1, cutoff=0.75)
            guess = f"; did you mean {near[0]}?" if near else ""
            found.append(f"{function} has no argument {name!r}{guess}")
        elif not any(_same(value, harmless) for harmless in fixed[name][0]):
            found.append(f"{name}={_shown(value)} cannot be honoured by {function}: {fixed[name][1]}")
    return found


def raise_all(lines: list[str]) -> None:
    """Raises: UserError with all the lines, if there are any."""
    if lines:
        raise UserError("\n".join(lines))


def tell_ignored(arguments: Mapping[str, Any]) -> None:
    """One note about the arguments in CHANGE_NOTHING that have a value."""
    given = [f"{name}={_shown(value)}" for name, value in arguments.items() if value is not None]
    if given:
        note(f"{', '.join(given)}: nothing here depends on {'it' if len(given) == 1 else 'them'}")


def note(text: str) -> None:
    """A line for a person, apart from what the program prints."""
    print(f"note: {text}", file=sys.stderr)


def _same(value: Any, harmless: Any) -> bool:
    """Equality by which True is not 1 and 1.0 is; arrays and other strangers equal nothing."""
    if value is None or harmless is None or isinstance(value, bool) or isinstance(harmless, bool):
        return value is harmless
    plain = (int, float, str, list, tuple, dict)
    return isinstance(value, plain) and isinstance(harmless, plain) and value == harmless


def _shown(value: Any) -> str:
    """The value as one short line: functions and objects by their kind, not by their address."""
    if value is None or isinstance(value, bool | int | float | str | list | tuple | dict):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return getattr(value, "__name__", type(value).__name__)

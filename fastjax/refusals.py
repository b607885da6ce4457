"""Arguments that Unsloth, PEFT and TRL users type and that change nothing here, or cannot be honoured."""

from collections.abc import Mapping
from typing import Any

from fastjax.errors import UserError
from fastjax.settings import nearest

# {argument: (the values that change nothing, what to say about any other)}
Fixed = Mapping[str, tuple[tuple[Any, ...], str]]

FROM_PRETRAINED: Fixed = {
    "load_in_8bit": ((False, None), "8-bit weights are not in this release; leave it out"),
    "load_in_16bit": ((True, False, None), ""),
    "full_finetuning": ((False, None), "skip get_peft_model instead: SFTTrainer then trains every weight"),
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
    "max_seq_length": ((None,), "it is an argument of from_pretrained"),
    "qat_scheme": ((None,), "quantisation-aware training is not in this release; leave it out"),
}

TRAINER: Fixed = {
    "packing": ((False, None), "packing is not in this release; leave it out"),
    "dataset_text_field": (("text", None), "text rows hold their text under 'text'; rename the column"),
    "dataset_num_proc": ((1, None), "rows are tokenised in this process; leave it out"),
    "data_collator": ((None,), "targets follow from SFTConfig(train_on=...); leave it out"),
    "formatting_func": ((None,), "map the rows to {'text': ...} beforehand"),
    "peft_config": ((None,), "give the settings to FastLanguageModel.get_peft_model"),
    "compute_metrics": ((None,), "the evaluation gives the loss; leave it out"),
    "callbacks": ((None, [], ()), "callbacks are not in this release; metrics.jsonl grows as the run goes on"),
    "optimizers": (((None, None), None), "choose with SFTConfig(optim=..., lr_scheduler_type=...)"),
    "model_init": ((None,), "give the model itself"),
}

SFT_CONFIG: Fixed = {
    "packing": TRAINER["packing"],
    "fp16": ((False, None), "there is no loss scaling here; load the model in bfloat16 instead"),
    "dataset_text_field": TRAINER["dataset_text_field"],
    "dataset_num_proc": TRAINER["dataset_num_proc"],
    "save_strategy": (("steps",), "checkpoints are written every save_steps; set a large save_steps to have one"),
    "logging_strategy": (("steps",), "logging goes by steps; set logging_steps"),
    "dataloader_num_workers": ((0, None), "rows are tokenised before training and no worker is needed; leave it out"),
    "remove_unused_columns": ((True, None), "columns that no row form knows are never used; leave it out"),
    "do_train": ((True, None), "call trainer.train() or not"),
    "group_by_length": ((False, None), "rows are put in buckets by length already; leave it out"),
    "load_best_model_at_end": ((False, None), "the last adapter is kept; look for the best step in metrics.jsonl"),
    "neftune_noise_alpha": ((None,), "NEFTune is not in this release; leave it out"),
    "label_smoothing_factor": ((0, None), "label smoothing is not in this release; leave it out"),
    "push_to_hub": ((False, None), "upload the saved folder with huggingface_hub"),
    "use_liger_kernel": ((False, None), "fastjax has its own kernels; leave it out"),
}

GENERATE: Fixed = {
    "use_cache": ((True, None), "decoding always uses the cache; leave it out"),
    "num_beams": ((1, None), "beam search is not in this release; leave it out"),
    "num_return_sequences": ((1, None), "give the prompt several times, with different seeds"),
    "repetition_penalty": ((1, None), "repetition penalties are not in this release; leave it out"),
    "min_p": ((None, 0), "min_p is not in this release; use top_p"),
    "streamer": ((None,), "the decoding loop is one compiled call; answers come when they are whole"),
    "return_dict_in_generate": ((False, None), "tokens are returned; leave it out"),
}


def refuse(function: str, fixed: Fixed, arguments: Mapping[str, Any], known: tuple[str, ...] = ()) -> None:
    """Pass arguments that change nothing.

    Args:
      function: the function's name, for the message.
      fixed: what is known of its arguments, one of the tables of this module.
      known: the arguments that it does honour, for a guess at a misspelt one.
    Raises: UserError for an unknown argument, or a value that cannot be honoured.
    """
    for name, value in arguments.items():
        if name not in fixed:
            raise UserError(f"{function} has no argument {name!r}{nearest(name, [*fixed, *known])}")
        harmless, words = fixed[name]
        if not any(value is same or (type(value) is type(same) and value == same) for same in harmless):
            raise UserError(f"{name}={value!r} cannot be honoured by {function}: {words}")

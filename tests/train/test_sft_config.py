"""TRL's and Hugging Face's words for a run's settings: translated, or refused by name."""

import pytest

from fastjax import SFTConfig
from fastjax.errors import UserError
from fastjax.train.config import TrainConfig


def test_the_words_of_trl_become_settings():
    config = SFTConfig(
        output_dir="out", max_length=512, max_steps=-1, optim="adamw_torch", bf16=True, packing=False,
        gradient_checkpointing=True, assistant_only_loss=False, eval_strategy="steps", eval_steps=5,
        report_to=["tensorboard"], save_strategy="steps", dataset_text_field="text", learning_rate=1e-4,
    ).train_config  # fmt: skip
    assert config == TrainConfig(
        output_dir="out", max_seq_length=512, remat="full", train_on="all", eval_steps=5, learning_rate=1e-4
    )


def test_own_names_and_defaults_are_those_of_the_command_line():
    assert SFTConfig(output_dir="out").train_config == TrainConfig(output_dir="out")
    assert SFTConfig(max_seq_length=64, warmup_ratio=0.1, seed=1).train_config.seed == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"learning_rat": 1e-4}, ["no argument 'learning_rat'", "did you mean learning_rate?"]),
        ({"deepspeed": "x.json"}, ["no argument 'deepspeed'"]),
        ({"packing": True}, ["packing=True cannot be honoured"]),
        ({"fp16": True}, ["fp16=True", "bfloat16"]),
        ({"bf16": False}, ["bf16=False", "dtype='float32'"]),
        ({"optim": "adamw_8bit"}, ["optim='adamw_8bit' is not in this release"]),
        ({"optim": "sgd"}, ["optim='sgd' is not one of adamw"]),
        ({"eval_strategy": "epoch"}, ["eval_strategy='epoch'", "eval_steps"]),
        ({"eval_strategy": "no", "eval_steps": 3}, ["eval_steps=3 with eval_strategy='no'"]),
        ({"dataset_num_proc": 2}, ["dataset_num_proc=2 cannot be honoured"]),
        ({"neftune_noise_alpha": 5}, ["neftune_noise_alpha=5"]),
        ({"max_length": None}, ["max_length=None"]),
        ({"gradient_checkpointing": "unsloth"}, ["gradient_checkpointing='unsloth'", "remat"]),
        ({"report_to": ["wandb", "tensorboard"]}, ["report_to="]),
        ({"lora_r": 8}, ["lora_r=8 is no argument of SFTConfig", "get_peft_model"]),
        ({"model": "m"}, ["from_pretrained"]),
        ({"data": "d"}, ["train_dataset"]),
        ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size=0"]),
        ({"num_train_epochs": "three"}, ["num_train_epochs='three' is not a number"]),
    ],
)
def test_what_cannot_be_honoured_is_an_error_that_says_so(arguments, words):
    with pytest.raises(UserError) as error:
        SFTConfig(**arguments)
    for word in words:
        assert word in str(error.value)

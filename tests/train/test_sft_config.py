"""TRL's and Hugging Face's words for a run's settings: translated, or refused by name."""

import pytest

from fastjax import SFTConfig
from fastjax.errors import UserError
from fastjax.train.config import TrainConfig


def test_the_words_of_trl_become_settings():
    config = SFTConfig(
        output_dir="out", max_length=512, max_steps=-1, optim="adamw_torch", bf16=True, packing=False,
        gradient_checkpointing=True, completion_only_loss=False, eval_strategy="steps", eval_steps=5,
        report_to=["tensorboard"], save_strategy="steps", dataset_text_field="text", learning_rate=1e-4,
    ).train_config  # fmt: skip
    assert config == TrainConfig(
        output_dir="out", max_seq_length=512, remat="full", train_on="all", eval_steps=5, learning_rate=1e-4
    )


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"])
def test_the_names_of_eight_bit_adamw(name):
    assert SFTConfig(optim=name).train_config.optim == "adamw_8bit"


def test_own_names_and_defaults_are_those_of_the_command_line():
    assert SFTConfig(output_dir="out").train_config == TrainConfig(output_dir="out")
    assert SFTConfig(max_seq_length=64, warmup_ratio=0.1, seed=1).train_config.seed == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"learning_rat": 1e-4}, ["no argument 'learning_rat'", "did you mean learning_rate?"]),
        ({"deepspeed": "x.json"}, ["deepspeed='x.json' cannot be honoured"]),
        ({"packing_strategy": "wrapped"}, ["packing_strategy='wrapped' cannot be honoured", "long_rows='split'"]),
        ({"padding_free": True}, ["padding_free=True cannot be honoured", "packing=True"]),
        ({"inspect": 3}, ["trainer.inspect"]),
        ({"load_best_model_at_end": "yes"}, ["load_best_model_at_end='yes' is not true or false"]),
        ({"fp16": True}, ["fp16=True", "bfloat16"]),
        ({"optim": "sgd"}, ["optim='sgd' is not one of adamw"]),
        ({"eval_strategy": "best"}, ["eval_strategy='best'", "'epoch'"]),
        ({"save_strategy": "best"}, ["save_strategy='best'"]),
        ({"save_strategy": "epoch", "save_steps": 3}, ["save_steps=3 with save_strategy='epoch'"]),
        ({"logging_strategy": "no"}, ["logging_strategy='no'", "logging_steps"]),
        ({"eval_strategy": "no", "eval_steps": 3}, ["eval_steps=3 with eval_strategy='no'"]),
        ({"group_by_length": True}, ["group_by_length=True", "changes the order"]),
        ({"dataset_kwargs": {"add_special_tokens": False}}, ["dataset_kwargs={'add_special_tokens': False}"]),
        ({"neftune_noise_alpha": 5}, ["neftune_noise_alpha=5"]),
        ({"max_length": None}, ["max_length=None"]),
        ({"gradient_checkpointing": "some"}, ["gradient_checkpointing='some'", "remat"]),
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


def test_all_that_is_wrong_is_one_error_with_a_line_each():
    with pytest.raises(UserError) as error:
        SFTConfig(padding_free=True, optim="paged_lion_8bit", learning_rat=1, per_device_train_batch_size=0, fp16=True)
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    for word in ("padding_free=True", "paged_lion_8bit", "learning_rat", "per_device_train_batch_size=0", "fp16=True"):
        assert sum(word in line for line in lines) == 1


def test_arguments_that_change_no_number_are_taken_and_told_once(capsys):
    config = SFTConfig(
        output_dir="out", eval_packing=True, dataloader_num_workers=4, dataloader_pin_memory=True, run_name="mine",
        remove_unused_columns=False, use_liger_kernel=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_dir="logs", logging_first_step=True, disable_tqdm=False, hub_token=None,
    )  # fmt: skip
    assert config.train_config == TrainConfig(output_dir="out")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: ") and "eval_packing=True" in line and "hub_token" not in line
    SFTConfig(output_dir="out", packing=False)
    assert capsys.readouterr().err == ""


def test_a_guess_is_made_for_a_misspelt_name_only():
    for name in ("tokens", "vocabulary", "deep"):
        with pytest.raises(UserError) as error:
            SFTConfig(**{name: 1})
        assert "did you mean" not in str(error.value)


def test_save_strategy_no_leaves_the_end_as_the_only_checkpoint():
    assert SFTConfig(save_strategy="no").train_config.save_steps >= 10**6
    assert SFTConfig(save_strategy="epoch", logging_strategy="epoch").each_epoch == ("save_steps", "logging_steps")


def test_loss_arguments_at_trl_s_defaults_leave_the_loss_on_responses():
    for arguments in (
        {"completion_only_loss": True, "assistant_only_loss": False},
        {"assistant_only_loss": False, "completion_only_loss": None},
        {"assistant_only_loss": True},
    ):
        assert SFTConfig(output_dir="out", **arguments).train_config.train_on == "responses"
    assert SFTConfig(output_dir="out", completion_only_loss=False).train_config.train_on == "all"


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_length": 10, "max_seq_length": 50},
        {"remat": "full", "gradient_checkpointing": False},
        {"gradient_checkpointing": False, "remat": "full"},
        {"train_on": "all", "assistant_only_loss": True},
    ],
)
def test_two_arguments_that_set_one_thing_differently_are_refused_by_name(arguments):
    with pytest.raises(UserError) as error:
        SFTConfig(output_dir="out", **arguments)
    assert all(name in str(error.value) for name in arguments)


def test_evaluation_by_steps_is_as_frequent_as_logging_unless_told():
    config = SFTConfig(output_dir="out", eval_strategy="steps", logging_steps=7).train_config
    assert config.eval_steps == 7
    assert SFTConfig(output_dir="out", eval_strategy="steps", eval_steps=3).train_config.eval_steps == 3

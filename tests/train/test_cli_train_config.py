"""Which training settings are refused, and in which words."""

import pytest
import yaml

from fastjax.cli import parse
from fastjax.errors import UserError
from fastjax.train.config import TrainConfig

GIVEN = {"model": "m", "data": "d.jsonl", "output_dir": "out"}


def test_the_defaults_are_valid_and_those_of_the_documentation():
    config = TrainConfig(**GIVEN)
    config.validate()
    assert (config.method, config.lora_r, config.lora_alpha, config.lora_dropout) == ("qlora", 16, 16, 0)
    assert (config.target_modules, config.max_seq_length, config.learning_rate) == ("all-linear", 2048, 2e-4)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (2, 4)
    assert (config.weight_decay, config.max_grad_norm, config.seed, config.resume) == (0.01, 1.0, 3407, "never")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, ["model is missing", "--model"]),
        ({"data": ""}, ["data is missing", "--data"]),
        ({"output_dir": ""}, ["output_dir is missing"]),
        ({"method": "dora"}, ["method='dora' is not one of qlora, lora, full", "did you mean lora?"]),
        ({"method": "lora", "bnb_4bit_quant_type": "fp4"}, ["bnb_4bit_quant_type='fp4'", "method=qlora"]),
        ({"method": "full", "llm_int8_skip_modules": ("q_proj",)}, ["llm_int8_skip_modules", "method=qlora"]),
        ({"bnb_4bit_quant_type": "int4"}, ["bnb_4bit_quant_type='int4' is not one of nf4, fp4"]),
        ({"optim": "sgd"}, ["optim='sgd' is not one of adamw, adamw_8bit, adamw_bf16"]),
        ({"remat": "full", "memory_budget_gib": 8.0}, ["memory_budget_gib=8.0 with remat='full'", "remat=auto"]),
        ({"memory_budget_gib": 0.0}, ["memory_budget_gib=0.0 is too small"]),
        ({"remat": "half"}, ["remat='half': 'half' is neither a policy nor an activation", "no_matmul"]),
        ({"remat": "2*full+mid full"}, ["remat='2*full+mid full' is not understood"]),
        ({"remat": "full,none"}, ["remat='full,none' is not understood at 'full'"]),
        ({"long_rows": "cut"}, ["long_rows='cut' is not one of truncate, drop, split, error"]),
        ({"dtype": "float16"}, ["dtype='float16'", "underflow", "use bfloat16"]),
        ({"mesh": "fsdp=2,fsdp=2"}, ["mesh='fsdp=2,fsdp=2'", "at 'fsdp=2'"]),
        ({"mesh": "data=two"}, ["mesh='data=two'", "fsdp=N"]),
        ({"mesh": "data=0"}, ["mesh='data=0'"]),
        ({"lora_r": 0}, ["lora_r=0", "1 or more"]),
        ({"lora_r": 8.5}, ["lora_r=8.5 is not a whole number"]),
        ({"lora_alpha": 0}, ["lora_alpha=0", "more than 0"]),
        ({"lora_dropout": 1.0}, ["lora_dropout=1.0", "less than 1"]),
        ({"lora_dropout": -0.1}, ["lora_dropout=-0.1"]),
        ({"rank_pattern": {"q_proj": 0}}, ["rank_pattern", "'q_proj'"]),
        ({"rank_pattern": {"q_proj": 1.5}}, ["rank_pattern", "whole number"]),
        ({"alpha_pattern": {"q_proj": -1}}, ["alpha_pattern", "'q_proj'"]),
        ({"layers_to_transform": (-1,)}, ["layers_to_transform=[-1]", "count from 0"]),
        ({"target_modules": ()}, ["target_modules=()"]),
        ({"method": "full", "lora_r": 8}, ["lora_r=8", "method=qlora and lora"]),
        ({"method": "full", "adapter": "a"}, ["adapter='a'", "method=qlora and lora"]),
        ({"max_seq_length": 1}, ["max_seq_length=1", "2 or more"]),
        ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size=0"]),
        ({"gradient_accumulation_steps": -4}, ["gradient_accumulation_steps=-4"]),
        ({"num_train_epochs": 0}, ["num_train_epochs=0", "more than 0"]),
        ({"max_steps": 0}, ["max_steps=0", "1 or more"]),
        ({"learning_rate": -1e-4}, ["learning_rate=-0.0001", "0 or more"]),
        ({"learning_rate": float("inf")}, ["learning_rate=inf", "finite"]),
        ({"lr_scheduler_type": "polynomial"}, ["lr_scheduler_type='polynomial'", "cosine"]),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, ["warmup_steps=5", "constant_with_warmup"]),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, ["warmup_ratio=0.1", "constant_with_warmup"]),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, ["warmup_steps=5", "warmup_ratio=0.1", "give one"]),
        ({"warmup_ratio": 1.0}, ["warmup_ratio=1.0", "less than 1"]),
        ({"adam_beta1": 1.0}, ["adam_beta1=1.0"]),
        ({"adam_epsilon": 0.0}, ["adam_epsilon=0.0"]),
        ({"max_grad_norm": -1.0}, ["max_grad_norm=-1.0"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"save_total_limit": 0}, ["save_total_limit=0"]),
        ({"logging_steps": 0}, ["logging_steps=0"]),
        ({"report_to": "mlflow"}, ["report_to='mlflow'", "tensorboard"]),
        ({"eval_steps": 5}, ["eval_steps=5 without eval_data", "eval_fraction"]),
        ({"load_best_model_at_end": True}, ["load_best_model_at_end=True without eval_data"]),
        ({"eval_data": "e", "eval_fraction": 0.1}, ["eval_data='e' and eval_fraction=0.1 both"]),
        ({"eval_data": "e", "early_stopping_patience": 2}, ["early_stopping_patience=2 without eval_steps"]),
        ({"eval_fraction": 1.0}, ["eval_fraction=1.0", "less than 1"]),
        ({"early_stopping_threshold": 0.1}, ["early_stopping_threshold=0.1 without early_stopping_patience"]),
        ({"html": "p.html"}, ["html='p.html' without inspect", "--inspect N"]),
        ({"inspect": 0}, ["inspect=0", "1 or more"]),
        ({"data": "a[1]"}, ["[1] is not a slice", "[:1000]"]),
        ({"data": "a,,b"}, ["has an empty name"]),
        ({"eval_data": "a*0"}, ["*0 is not a weight"]),
        ({"data_columns": "prompt"}, ["data_columns='prompt' is not understood", "KEY=COLUMN"]),
        ({"data_columns": "question=a"}, ["'question' is no key of a row form", "completion"]),
        ({"data_columns": "text=a,text=b"}, ["names a key twice"]),
        ({"resume": "auto", "overwrite_output_dir": True}, ["resume='auto'", "overwrite_output_dir"]),
    ],
)
def test_an_impossible_or_contradictory_setting_is_refused_by_name(changes, words):
    with pytest.raises(UserError) as error:
        TrainConfig(**{**GIVEN, **changes}).validate()
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


def test_a_written_config_reads_back_as_the_same_run(tmp_path):
    config = TrainConfig(
        **GIVEN, target_modules=("q_proj", "v_proj"), rank_pattern={"q_proj": 4}, adam_epsilon=1e-8, eval_data="e.jsonl"
    )
    config.validate()
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert parse(TrainConfig, ["--config", str(file)])[0] == config

"""Settings beyond what int32 counts or float32 holds are refused by name, before anything is loaded."""

import pytest

from fastjax.errors import UserError
from fastjax.export import ExportConfig
from fastjax.generate import GenerateConfig
from fastjax.train.config import TrainConfig
from fastjax.train.schedule import total_optimizer_steps


@pytest.mark.parametrize(
    "setting",
    [
        {"max_steps": 3_000_000_000},
        {"num_train_epochs": 1e300},
        {"warmup_steps": 10**12},
        {"per_device_train_batch_size": 10**12},
        {"per_device_eval_batch_size": 10**12},
        {"gradient_accumulation_steps": 10**12},
        {"seed": 2**32},
        {"seed": -1},
        {"learning_rate": 1e39},
        {"weight_decay": 1e39},
        {"adam_beta1": 0.99999999999},
        {"adam_beta2": 0.99999999999},
        {"adam_epsilon": 1e-46},
        {"adam_epsilon": 1e39},
    ],
    ids=str,
)
def test_a_setting_out_of_bounds_is_refused_by_name(setting):
    ((name, value),) = setting.items()
    with pytest.raises(UserError, match=f"{name}={value}".replace("+", r"\+")):
        TrainConfig(model="m", data="d", output_dir="o", **setting).validate()


def test_the_largest_values_pass():
    TrainConfig(
        model="m", data="d", output_dir="o", max_steps=2**31 - 1, per_device_train_batch_size=2**20, seed=2**32 - 1,
        warmup_steps=2**31 - 1, adam_beta2=0.999999, adam_epsilon=1e-30, learning_rate=1.0,
    ).validate()  # fmt: skip


def test_epochs_that_make_too_many_steps_are_refused():
    with pytest.raises(UserError, match="num_train_epochs=1000000000.0 over 3 steps"):
        total_optimizer_steps(3, 1e9)


def test_the_seed_of_generate_has_the_same_bounds():
    GenerateConfig(model="m", prompt="p", seed=2**32 - 1).validate()
    for seed in (-1, 2**32):
        with pytest.raises(UserError, match=f"seed={seed}"):
            GenerateConfig(model="m", prompt="p", seed=seed).validate()


def test_an_export_below_a_file_is_refused_before_the_model_is_opened(tmp_path):
    (tmp_path / "file").write_text("")
    for place, words in (("file/out", "lies below"), ("a" * 300, "too long")):
        with pytest.raises(UserError, match=words):
            ExportConfig(model="nowhere", output_dir=str(tmp_path / place)).validate()

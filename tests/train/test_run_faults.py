"""What ends a run early or starts it wrongly: the state stays whole, and the message names what to go on from."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import DeviceMemoryError, Interrupted, NumericsError, UserError
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import LoraParam
from fastjax.models.lora import LoraConfig, apply_lora
from fastjax.train import files, steps
from fastjax.train.config import TrainConfig
from fastjax.train.data import DataReport, TokenisedDataset
from fastjax.train.data.tokenise import TokenRow
from fastjax.train.evaluate import EvalResult
from fastjax.train.loop import Trainer
from fastjax.train.memory import remedies
from fastjax.train.metrics import read_metrics
from fastjax.train.run_lock import locked
from fastjax.train.state import CheckpointStore

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }
)  # fmt: skip
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
ROWS = TokenisedDataset(
    [TokenRow(np.arange(1, 13, dtype=np.int32), np.arange(12) > 3) for _ in range(4)], DataReport("made here")
)


def base(method):
    model = CausalLM(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)
    return model if method == "full" else apply_lora(model, LORA, jax.random.key(0))


def trainer(folder, model=None, method="full", **settings):
    common = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "report_to": "none", "save_steps": 1}
    config = TrainConfig(output_dir=str(folder), method=method, **{**common, "max_steps": 2, **settings})
    lora = None if method == "full" else LORA
    return Trainer(model or base(method), config, ROWS, ROWS, lora=lora)


def test_a_signal_in_the_last_evaluation_interrupts_and_a_resume_evaluates(tmp_path, monkeypatch):
    def evaluate(*_, stop, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()

    with monkeypatch.context() as patch:
        patch.setattr(steps, "evaluate", evaluate)
        with pytest.raises(Interrupted, match="after step 2 of 2.*checkpoints/2") as stopped:
            trainer(tmp_path / "run").train()
    assert stopped.value.exit_code == 143
    result = trainer(tmp_path / "run", resume="auto").train()
    assert np.isfinite(result.evaluation.loss)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in line] == [2]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_an_evaluation_that_is_not_finite_ends_the_run_and_names_the_last_good_checkpoint(tmp_path, monkeypatch, loss):
    monkeypatch.setattr(steps, "evaluate", lambda *args, **kwargs: EvalResult(loss, 8))
    with pytest.raises(NumericsError, match=f"step 2: eval_loss {loss}.*checkpoints/1\n") as stopped:
        trainer(tmp_path / "run").train()
    assert stopped.value.exit_code == 4
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [1]


def test_infinite_weights_of_the_last_step_are_never_saved(tmp_path):
    with pytest.raises(NumericsError, match="step 1: .*updated weights must be finite.*none was saved"):
        trainer(tmp_path / "run", max_steps=1, learning_rate=3e38, weight_decay=1e3).train()
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == []


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_model_that_this_process_has_trained_can_go_on(tmp_path, method):
    first = trainer(tmp_path / "run", method=method)
    first.train()
    assert trainer(tmp_path / "run", first.model, method, max_steps=3, resume="auto").train().step == 3


def test_a_run_in_a_folder_in_use_changes_nothing(tmp_path):
    with locked(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").write_text("# A fastjax run; `--config` takes this file.\n")
        with pytest.raises(UserError, match=f"in use by a run of process {os.getpid()}"):
            trainer(tmp_path / "run", overwrite_output_dir=True).train()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.yaml"]


def poison(monkeypatch, *bad_steps):
    """The loss of these steps is NaN."""
    make = steps.make_train_step

    def poisoned(*args, **kwargs):
        step, calls = make(*args, **kwargs), []

        def call(trainable, opt_state, frozen, batch, rng):
            calls.append(None)
            if len(calls) in bad_steps:
                frozen = jax.tree.map(lambda leaf: leaf * jnp.nan, frozen)
            return step(trainable, opt_state, frozen, batch, rng)

        return call

    monkeypatch.setattr(steps, "make_train_step", poisoned)


def test_a_step_that_is_not_finite_is_skipped_and_counted_if_that_is_wanted(tmp_path, monkeypatch, capsys):
    said = []
    with monkeypatch.context() as patch:
        poison(patch, 2, 4)
        run = trainer(tmp_path / "run", method="lora", max_steps=5, nonfinite="skip", logging_steps=2)
        run.say = said.append
        result = run.train()
    error = capsys.readouterr().err
    assert "step 2: loss nan, gradient norm nan; its update is skipped" in error and "step 4: loss nan" in error
    assert said[-1] == "2 steps skipped, 0 spikes of loss or gradient norm"
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert [(line["step"], line.get("num_skipped")) for line in lines] == [(2, 1), (4, 1), (5, None)]
    assert lines[0]["grad_norm"] is None and all(np.isfinite(line["loss"]) for line in lines)
    assert np.isfinite(result.training_loss)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(nnx.state(run.model, LoraParam)))


def test_weights_that_stay_nan_end_the_run_whatever_is_wanted(tmp_path, monkeypatch):
    poison(monkeypatch, *range(2, 30))
    with pytest.raises(NumericsError, match="step 11: .*after 9 skipped steps in a row.*checkpoints/10") as stopped:
        trainer(tmp_path / "run", method="lora", max_steps=30, nonfinite="skip").train()
    assert stopped.value.exit_code == 4


def test_a_checkpoint_that_fails_in_the_background_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    def full_disk(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "sha256", full_disk)
    run = trainer(tmp_path / "run", method="lora", max_steps=50, save_steps=2)
    with pytest.raises(OSError, match="No space left"):
        run.train()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] <= 4


def test_memory_that_is_not_enough_is_told_with_what_this_run_can_do(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 999 bytes")

    monkeypatch.setattr(steps, "make_train_step", lambda *args, **kwargs: full)
    with pytest.raises(DeviceMemoryError, match="allocating 999 bytes\n.*per_device_train_batch_size 1") as stopped:
        trainer(tmp_path / "run", method="lora").train()
    assert stopped.value.exit_code == 3


def test_what_takes_less_memory_leaves_out_what_the_run_does_already():
    config = TrainConfig(method="full", remat="none", per_device_train_batch_size=6, gradient_accumulation_steps=1)
    first, second, third, *_ = remedies(config)
    assert "--remat full or offload (it is none)" in first and "--method qlora" in third
    assert "--per_device_train_batch_size 3 --gradient_accumulation_steps 2" in second
    least = TrainConfig(method="qlora", remat="full", per_device_train_batch_size=1, optim="adamw_8bit")
    offload, shorter, beforehand = remedies(least)
    assert offload == "use --remat offload (it is full)"
    assert shorter == "make --max_seq_length smaller (it is 2048)" and "fastjax.plan" in beforehand


def test_overrides_are_checked():
    common = {"model": "m", "data": "d", "output_dir": "o"}
    with pytest.raises(UserError, match="resume_override=.lora_r.: of what a checkpoint fixes, a resumed"):
        TrainConfig(**common, resume="auto", resume_override=("lora_r",)).validate()
    with pytest.raises(UserError, match="resume_override=mesh without resume"):
        TrainConfig(**common, resume_override=("mesh",)).validate()
    TrainConfig(**common, resume="auto", resume_override=("mesh", "learning_rate")).validate()


def test_a_run_goes_on_with_a_setting_that_is_overridden(tmp_path):
    trainer(tmp_path / "run", method="lora").train()
    changed = {"method": "lora", "max_steps": 3, "resume": "auto", "learning_rate": 1e-5}
    with pytest.raises(UserError, match="--resume_override learning_rate"):
        trainer(tmp_path / "run", **changed).train()
    assert trainer(tmp_path / "run", **changed, resume_override=("learning_rate",)).train().step == 3

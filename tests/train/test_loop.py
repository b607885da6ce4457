"""Whole runs over a tiny model: logging, resuming bit-equal, signals, NaN, few compilations."""

import json
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import Interrupted, NumericsError, UserError
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import LoraParam
from fastjax.models.lora import LoraConfig, apply_lora
from fastjax.train import steps
from fastjax.train.config import TrainConfig
from fastjax.train.data import DataReport, TokenisedDataset
from fastjax.train.data.tokenise import TokenRow
from fastjax.train.loop import Trainer
from fastjax.train.metrics import read_metrics
from fastjax.train.state import CheckpointStore

LORA = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.2, target_modules=["q_proj", "down_proj"])
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
KEYS = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_target_tokens",
    "num_tokens",
    "tokens_per_second",
    "step_time_s",
    "peak_memory_bytes",
}


def dataset(lengths, seed=0):
    rng = np.random.default_rng(seed)
    rows = [TokenRow(rng.integers(1, 61, n, dtype=np.int32), np.arange(n) > n // 3) for n in lengths]
    return TokenisedDataset(rows, DataReport("made here"))


ROWS = dataset([13, 16, 9, 12, 16, 10, 15])
EVAL_ROWS = dataset([12, 16, 5], seed=1)


def trainer(folder, eval_rows=None, rows=ROWS, finish=None, say=print, **settings):
    model = apply_lora(CausalLM(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32), LORA, jax.random.key(0))
    common = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
    }
    config = TrainConfig(output_dir=str(folder), **{**common, **settings})
    return Trainer(model, config, rows, eval_rows, lora=LORA, finish=finish, say=say)


def adapter(run):
    return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(run.model, LoraParam))]


def without_times(lines):
    return [{k: v for k, v in line.items() if k not in ("tokens_per_second", "step_time_s")} for line in lines]


def signal_at(monkeypatch, number, call):
    """The process gets the signal during step `call`, while the batch after it is being prepared."""
    put, calls = steps.put_batch, []

    def counted(batch, mesh):
        calls.append(None)
        if len(calls) == call + 1:
            os.kill(os.getpid(), number)
        return put(batch, mesh)

    monkeypatch.setattr(steps, "put_batch", counted)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three epochs of two steps each, not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finished = []
    run = trainer(
        folder,
        EVAL_ROWS,
        num_train_epochs=3,
        logging_steps=2,
        eval_steps=3,
        save_steps=2,
        finish=lambda model, place: finished.append(place.adapter),
    )
    result = run.train()
    return folder, run, result, finished


def test_the_run_folder_holds_what_the_design_says(whole):
    folder, run, result, finished = whole
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", "config.yaml", "loss.png", "metrics.jsonl"]
    assert finished == [folder / "adapter"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert CheckpointStore(folder / "checkpoints").steps() == [2, 4, 6]
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 3, 4, 6, 6]
    training = [line for line in lines if "loss" in line]
    assert all(set(line) == KEYS for line in training)
    targets = int(ROWS.loss_mask.sum())
    assert [line["num_target_tokens"] for line in training] == [targets] * 3
    assert [line["num_tokens"] for line in training] == [len(ROWS.input_ids)] * 3
    assert [line["epoch"] for line in training] == [1.0, 2.0, 3.0]
    np.testing.assert_allclose([line["learning_rate"] for line in training], [1e-3 * f for f in (5 / 6, 0.5, 1 / 6)])
    assert training[0]["peak_memory_bytes"] is None
    assert (result.step, result.num_target_tokens, result.loss) == (6, 3 * targets, training[-1]["loss"])
    evaluations = [line for line in lines if "eval_loss" in line]
    assert all(set(line) == {"step", "eval_loss", "num_target_tokens"} for line in evaluations)
    assert evaluations[-1]["num_target_tokens"] == int(EVAL_ROWS.loss_mask.sum()) == result.evaluation.num_target_tokens


def test_config_yaml_gives_the_settings_back(whole):
    import yaml

    folder, run, _, _ = whole
    assert yaml.safe_load((folder / "config.yaml").read_text()) == run.config.to_dict()


@pytest.mark.parametrize("number, stop_at, code", [(signal.SIGTERM, 3, 143), (signal.SIGINT, 5, 130)])
def test_a_stopped_and_resumed_run_ends_bit_equal(whole, tmp_path, monkeypatch, number, stop_at, code):
    folder, run, _, _ = whole
    settings = {"num_train_epochs": 3, "logging_steps": 2, "eval_steps": 3, "save_steps": 2}
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        signal_at(patch, number, stop_at)
        with pytest.raises(Interrupted, match=f"after step {stop_at} of 6.*\n.*--resume auto") as stopped:
            trainer(tmp_path / "run", EVAL_ROWS, **settings).train()
    assert stopped.value.exit_code == code
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    # What a killed process may leave: a torn line, and one of a step whose state was never saved.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "loss": 0.0}) + '\n{"step": 6, "lo')
    again = trainer(tmp_path / "run", EVAL_ROWS, resume="auto", **settings)
    again.train()
    for ours, theirs in zip(adapter(again), adapter(run), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    lines = [read_metrics(place / "metrics.jsonl") for place in (tmp_path / "run", folder)]
    key = lambda line: (line["step"], "eval_loss" in line)  # noqa: E731
    assert sorted(without_times(lines[0]), key=key) == sorted(without_times(lines[1]), key=key)


def test_a_run_resumed_from_an_earlier_checkpoint_drops_the_later_ones(whole, tmp_path):
    import shutil

    folder, run, _, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    settings = {"num_train_epochs": 3, "logging_steps": 2, "save_steps": 4}
    again = trainer(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoints" / "2"), **settings)
    again.train()
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [2, 4, 6]
    for ours, theirs in zip(adapter(again), adapter(run), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_resuming_with_other_settings_names_them(whole, tmp_path):
    import shutil

    folder, _, _, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    with pytest.raises(UserError, match="seed was 3407 and is now 1"):
        trainer(tmp_path / "run", resume="auto", num_train_epochs=3, seed=1).train()
    changed = {"learning_rate": 1.0, "lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1,
               "max_grad_norm": 2.0, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}  # fmt: skip
    with pytest.raises(UserError, match="--adapter") as error:
        trainer(tmp_path / "run", resume="auto", num_train_epochs=3, **changed).train()
    for name, value in changed.items():
        assert re.search(f"{name} was .* and is now {value!r}", str(error.value))
    with pytest.raises(UserError, match="the tokenised rows are others"):
        trainer(tmp_path / "run", resume="auto", rows=EVAL_ROWS).train()
    with pytest.raises(UserError, match="at step 6, and this run ends at 2"):
        trainer(tmp_path / "run", resume="auto", max_steps=2).train()
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [2, 4, 6]


def test_resuming_with_other_reporting_and_a_later_end_says_so_and_is_taken(whole, tmp_path, capsys):
    import shutil

    folder, _, _, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    said = []
    settings = {"logging_steps": 3, "save_steps": 50, "per_device_eval_batch_size": 2, "remat": "none"}
    result = trainer(tmp_path / "run", resume="auto", max_steps=7, say=said.append, **settings).train()
    assert said[0] == f"going on from {tmp_path / 'run' / 'checkpoints' / '6'} (step 6 of 7)"
    assert said[1].startswith("note: the run was to end at step 6 and now ends at step 7; the linear schedule is")
    assert (result.first_step, result.step, result.num_rows) == (6, 7, 4)
    # Not a terminal: whole lines, no carriage return.
    assert re.fullmatch(r"step 7/7 loss \d+\.\d{4} \d+ tokens/s\n", capsys.readouterr().err)


def test_a_finished_run_says_so_and_changes_nothing(whole, tmp_path):
    import shutil

    folder, run, _, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    said = []
    again = trainer(tmp_path / "run", EVAL_ROWS, resume="auto", num_train_epochs=3, say=said.append)
    result = again.train()
    assert said == ["already at step 6 of 6; raise --max_steps or --num_train_epochs to go on"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert (result.first_step, result.step, result.training_loss) == (6, 6, None)
    # The model in hand is the trained one.
    for ours, theirs in zip(adapter(again), adapter(run), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_run_killed_before_its_result_was_written_writes_it_when_resumed(whole, tmp_path):
    import shutil

    folder, _, _, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    finished = []
    settings = {"resume": "auto", "num_train_epochs": 3, "finish": lambda model, place: finished.append(place)}
    trainer(tmp_path / "run", **settings).train()
    assert len(finished) == 1


def test_the_result_has_the_figures_that_trl_users_read(whole):
    _, _, result, _ = whole
    lines = [line for line in result.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert result.training_loss == pytest.approx(np.mean([line["loss"] for line in lines]), rel=1e-6)
    metrics = result.metrics
    assert set(metrics) == {
        "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "epoch"
    }  # fmt: skip
    assert metrics["train_loss"] == result.training_loss and metrics["epoch"] == 3
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(3 * len(ROWS))
    assert metrics["train_steps_per_second"] * metrics["train_runtime"] == pytest.approx(6)


def test_a_folder_in_use_is_refused_and_an_overwritten_one_starts_anew(whole, tmp_path):
    import shutil

    folder, _, _, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--resume auto.*--overwrite_output_dir"):
        trainer(tmp_path / "run", max_steps=1).train()
    trainer(tmp_path / "run", max_steps=1, overwrite_output_dir=True).train()
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [1]
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_setting_that_cannot_be_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="remat='half': 'half' is neither a policy"):
        trainer(tmp_path / "run", remat="half")
    with pytest.raises(UserError, match="from 0 to"):
        trainer(tmp_path / "run", seed=2**32).train()
    assert not (tmp_path / "run").exists()


def test_a_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    run = trainer(tmp_path / "run", num_train_epochs=3, save_steps=1, logging_steps=5)
    schedule = run.schedule
    make = steps.make_train_step

    def poisoned(*args, **kwargs):
        step, calls = make(*args, **kwargs), []

        def call(trainable, *rest):
            calls.append(None)
            if len(calls) == 3:
                trainable = jax.tree.map(lambda leaf: leaf * jnp.nan, trainable)
            return step(trainable, *rest)

        return call

    monkeypatch.setattr(steps, "make_train_step", poisoned)
    with pytest.raises(NumericsError, match=r"step 3: loss nan.*\n?.*checkpoints/2\n") as stopped:
        run.train()
    assert stopped.value.exit_code == 4
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [1, 2]
    assert schedule(0) == 1e-3


def test_thirty_lengths_compile_at_most_four_steps_and_the_second_epoch_none(tmp_path):
    compiled, epoch = [], [0]
    run = trainer(
        tmp_path / "run", rows=dataset(range(5, 35)), per_device_train_batch_size=1, gradient_accumulation_steps=1,
        num_train_epochs=2, logging_steps=30, save_steps=100,
    )  # fmt: skip
    make = steps.make_train_step

    def counted(*args, **kwargs):
        step = make(*args, **kwargs)

        def call(*inputs):
            out = step(*inputs)
            epoch[0] += 1
            compiled.append(step._cache_size())
            return out

        return call

    steps.make_train_step = counted
    try:
        run.train()
    finally:
        steps.make_train_step = make
    assert len(compiled) == 60
    assert compiled[29] <= 4
    assert compiled[59] == compiled[29]


def test_tensorboard_events_can_be_read(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer(tmp_path / "run", EVAL_ROWS, max_steps=2, report_to="tensorboard").train()
    events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose([e.value for e in events.Scalars("train/loss")], losses, rtol=1e-6)
    assert [e.step for e in events.Scalars("eval/loss")] == [2]


def test_full_training_runs_through_the_same_loop_and_ends_in_the_model(tmp_path):
    model = CausalLM(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    before = [np.array(leaf, np.float32) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    config = TrainConfig(output_dir=str(tmp_path / "run"), method="full", max_steps=2, report_to="none")
    Trainer(model, config, ROWS).train()
    for leaf, old in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), before, strict=True):
        assert leaf.dtype == jnp.float32
        assert np.any(np.asarray(leaf) != old)

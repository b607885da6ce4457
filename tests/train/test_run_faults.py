"""What ends a run early or starts it wrongly: the state stays whole, and the message names what to go on from."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import Interrupted, NumericsError, UserError
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, apply_lora
from fastjax.train import loop
from fastjax.train.config import TrainConfig
from fastjax.train.data import DataReport, TokenisedDataset
from fastjax.train.data.tokenise import TokenRow
from fastjax.train.evaluate import EvalResult
from fastjax.train.loop import Trainer
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
    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted, match="after step 2 of 2.*checkpoints/2") as stopped:
            trainer(tmp_path / "run").train()
    assert stopped.value.exit_code == 143
    result = trainer(tmp_path / "run", resume="auto").train()
    assert np.isfinite(result.evaluation.loss)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in line] == [2]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_an_evaluation_that_is_not_finite_ends_the_run_and_names_the_last_good_checkpoint(tmp_path, monkeypatch, loss):
    monkeypatch.setattr(loop, "evaluate", lambda *args, **kwargs: EvalResult(loss, 8))
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

"""The best evaluation, early stopping, rows held out: judged from the log, the same after a resume."""

import json
import math

import numpy as np
import pytest

from fastjax.train import steps
from fastjax.train.__main__ import main as train
from fastjax.train.best import Best, best_of
from fastjax.train.evaluate import EvalResult


def lines(*losses):
    return [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses, start=1)]


def test_the_best_and_the_evaluations_since_the_last_fall():
    assert best_of([{"step": 1, "loss": 0.1}]) == Best(None, math.inf, 0)
    assert best_of(lines(3.0)) == Best(1, 3.0, 0)
    assert best_of(lines(3.0, 2.0, 2.5, 2.0)) == Best(2, 2.0, 2)
    assert best_of(lines(3.0, 2.95, 2.9), threshold=0.2) == Best(3, 2.9, 2)
    assert best_of(lines(3.0, 2.7), threshold=0.2) == Best(2, 2.7, 0)


@pytest.fixture
def run(model_folder, rows_file, tmp_path, monkeypatch, capsys):
    """A function (flags) -> the JSON result of a run of ten steps whose evaluations give the scripted losses."""

    def start(losses, **flags):
        scripted = dict(losses)

        def evaluate(step, trainable, frozen, batches, **_):
            list(batches)
            return EvalResult(scripted[int(number[-1])], 5)

        number = []
        owes = steps.Run._owes_evaluation

        def noted(self):
            number.append(self.step)
            return owes(self)

        monkeypatch.setattr(steps, "evaluate", evaluate)
        monkeypatch.setattr(steps.Run, "_owes_evaluation", noted)
        settings = {
            "model": model_folder, "data": rows_file, "method": "lora", "dtype": "float32", "max_seq_length": 64,
            "lora_r": 2, "target_modules": "q_proj", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
            "max_steps": 10, "eval_fraction": 0.25, "eval_steps": 2, "report_to": "none", "learning_rate": 1e-2,
            "output_dir": tmp_path / "run", "save_steps": 100, **flags,
        }  # fmt: skip
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]
        assert train([*words, "--json"]) == 0
        printed = capsys.readouterr()
        return json.loads(printed.out.splitlines()[-1]), printed.err

    return start


def adapter_of(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_a_run_stops_early_keeps_the_best_weights_and_a_resumed_one_judges_alike(run, tmp_path):
    losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.4, 10: 1.0}
    flags = {"early_stopping_patience": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    result, said = run(losses, **flags)
    assert (result["step"], result["best_step"], result["best_eval_loss"], result["eval_loss"]) == (8, 4, 2.0, 2.4)
    assert "stopped early after step 8 of 10: 2 evaluations in a row brought no lower eval_loss than 2.0000" in said
    assert "the weights are those of step 4" in said
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == [4, 8]
    best = adapter_of(tmp_path / "run")
    # The same four steps alone: what was saved is what was there at step 4.
    other, _ = run(losses, max_steps=10, early_stopping_patience=1, output_dir=tmp_path / "other")
    assert other["step"] == 6
    four, _ = run(losses, **flags, resume="auto")
    assert four["step"] == 8
    assert all(np.array_equal(best[name], tensor) for name, tensor in adapter_of(tmp_path / "run").items())
    assert any(not np.array_equal(best[name], tensor) for name, tensor in adapter_of(tmp_path / "other").items())


def test_without_early_stopping_the_last_weights_are_saved_and_the_best_is_told(run):
    result, said = run({2: 3.0, 4: 2.0, 6: 2.5, 8: 2.4, 10: 2.2})
    assert (result["step"], result["best_step"], result["eval_loss"]) == (10, 4, 2.2)
    assert "stopped early" not in said and "the weights are those" not in said
    assert "3 held out for evaluation" in said

"""Interval sums, the metrics file and its repair, writers, the plot."""

import json
import sys
import types

import pytest

from fastjax.errors import UserError
from fastjax.train import metrics
from fastjax.train.metrics import Interval, MetricsFile, check_writer, make_writer, plot_loss, read_metrics


def test_an_interval_weighs_steps_by_their_targets():
    interval = Interval()
    interval.add({"finite": True, "loss_sum": 8.0, "num_target_tokens": 8, "num_tokens": 10})
    interval.add({"finite": True, "loss_sum": 10.0, "num_target_tokens": 2, "num_tokens": 5})
    interval.seconds = 3.0
    line = interval.line(step=2, epoch=0.5, grad_norm=1.0, learning_rate=1e-3)
    assert (line["loss"], line["num_target_tokens"], line["tokens_per_second"], line["step_time_s"]) == (
        1.8,
        10,
        5,
        1.5,
    )
    assert Interval(**json.loads(json.dumps(interval.to_dict()))) == interval


def test_an_interval_without_targets_has_no_loss():
    assert Interval().line(step=1, epoch=0.1, grad_norm=0.0, learning_rate=0.0)["loss"] is None


def test_torn_and_later_lines_are_dropped_at_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\nnull\n{"step": 3}\n{"ste')
    log = MetricsFile(path, keep_until=2)
    log.write({"step": 3, "loss": 0.5})
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 0.5}\n'
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_a_new_file_starts_empty(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\n')
    MetricsFile(tmp_path / "m").close()
    assert (tmp_path / "m").read_text() == ""


@pytest.mark.parametrize("name, package", [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named_before_anything_starts(monkeypatch, name, package):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=f"needs the package {package}"):
        check_writer(name)
    check_writer("none")


def test_wandb_gets_every_scalar(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finished")
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **settings: run))
    writer = make_writer("wandb", tmp_path, {"seed": 1}, step=0)
    writer.write({"step": 4, "loss": 2.0, "peak_memory_bytes": None})
    writer.write({"step": 4, "eval_loss": 3.0, "num_target_tokens": 7})
    writer.close()
    assert calls == [(4, {"train/loss": 2.0}), (4, {"eval/loss": 3.0, "eval/num_target_tokens": 7}), "finished"]


def test_the_plot_is_a_png_even_without_a_point(tmp_path):
    for lines in ([], [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 3.0}, {"step": 2, "loss": None}]):
        plot_loss(lines, tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

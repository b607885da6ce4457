"""One run through the commands, from a folder that transformers saved to an adapter that PEFT loads."""

import contextlib
import io
import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from fastjax import evaluate, export
from fastjax.cli import parse
from fastjax.train.__main__ import main as train
from fastjax.train.config import TrainConfig
from fastjax.train.result import TrainResult
from fastjax.train.run import RunResult

LORA = {"lora_r": 4, "lora_alpha": 8, "target_modules": "q_proj,v_proj,down_proj"}


def flags(**settings: object) -> list[str]:
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def common(model_folder, rows_file) -> dict:
    return {
        "model": model_folder, "data": rows_file, "method": "lora", "dtype": "float32", "max_seq_length": 64,
        "per_device_eval_batch_size": 6, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1,
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(common, tmp_path_factory) -> tuple[Path, dict]:
    """A finished run's folder, and what it printed with --json."""
    output = tmp_path_factory.mktemp("run") / "out"
    settings = {**common, **LORA, "eval_data": common["data"], "output_dir": output, "max_steps": 4}
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert train(flags(**settings, learning_rate=1e-2, sample_prompt="red cat", json=True)) == 0
    return output, json.loads(stdout.getvalue())


def test_the_result_is_one_json_object(finished):
    output, result = finished
    assert result["step"] == 4 and result["saved"] == str(output / "adapter")
    assert result["loss"] < 5.9 and set(result["sample"]) == {"before", "after"}
    assert (output / "adapter" / "chat_template.jinja").is_file()


def test_the_loss_equals_what_peft_computes_for_the_saved_adapter(finished, model_folder, rows, peft_loss):
    from transformers import AutoModelForCausalLM

    output, result = finished
    expected = peft_loss(AutoModelForCausalLM.from_pretrained(model_folder), output / "adapter", rows)
    assert result["eval_loss"] == pytest.approx(expected, abs=1e-5)


def test_evaluate_prints_the_same_loss_for_the_saved_adapter(finished, common, capsys):
    output, result = finished
    settings = {**common, "adapter": output / "adapter"}
    del settings["method"], settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    assert evaluate.main(flags(**settings, json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["eval_loss"] == pytest.approx(result["eval_loss"], abs=1e-6)
    assert printed["num_target_tokens"] == 174 and printed["data"]["rows_used"] == 12
    assert printed["perplexity"] == pytest.approx(math.exp(result["eval_loss"]))
    assert evaluate.main(flags(**settings)) == 0
    assert capsys.readouterr().out.startswith(f"eval_loss={result['eval_loss']:.6f} num_target_tokens=174 ")
    # The run's own settings serve too.
    assert evaluate.main(flags(config=output / "config.yaml", adapter=output / "adapter")) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"eval_loss={result['eval_loss']:.6f} num_target_tokens=174 ")
    assert "passed over: output_dir, method, " in printed.err and "bfloat16" not in printed.err


@pytest.mark.parametrize(
    ("form", "dtype", "tolerance"), [("merged_32bit", "float32", 2e-5), ("merged_16bit", "bfloat16", 0.1)]
)
def test_the_export_is_the_adapted_model_in_transformers(finished, model_folder, tmp_path, form, dtype, tolerance):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    output, _ = finished
    merged = tmp_path / "merged"
    words = flags(model=model_folder, adapter=output / "adapter", output_dir=merged, format=form)
    assert export.main(words) == 0
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), output / "adapter")
    ours, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True, dtype="auto")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert str(ours.dtype) == f"torch.{dtype}"
    ids = torch.arange(40).reshape(1, 40)
    with torch.no_grad():
        torch.testing.assert_close(ours.float()(ids).logits, adapted(ids).logits, atol=tolerance, rtol=0)
    assert json.loads((merged / "generation_config.json").read_text())["eos_token_id"] == [257]
    assert (merged / "chat_template.jinja").read_text() == (model_folder / "chat_template.jinja").read_text()
    # An export may be replaced by another, and only when that is asked for.
    assert export.main(words) == 2
    assert export.main([*words, "--overwrite_output_dir"]) == 0


def test_the_resolved_config_names_the_run_and_nothing_that_deletes_one(finished):
    output, _ = finished
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert config["lora_r"] == 4 and config["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    assert "overwrite_output_dir" not in config and "resume" not in config
    # The same command again does not touch the finished run.
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert train(["--config", str(output / "config.yaml")]) == 2
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_a_finished_run_that_is_resumed_says_so_and_is_left_as_it_is(finished, capsys):
    output, _ = finished
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert train(["--config", str(output / "config.yaml"), "--resume", "auto"]) == 0
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    printed = capsys.readouterr().out
    assert "already at step 4 of 4; raise --max_steps or --num_train_epochs to go on" in printed
    assert "is answered" not in printed and printed.splitlines()[-1].startswith("0 steps in 0 s")


def test_the_python_face_reports_on_both_sets_of_rows_too(finished, common):
    from fastjax.models.checkpoint.load import load_model
    from fastjax.models.peft_io import load_adapter
    from fastjax.train.parts import open_base
    from fastjax.train.rows import load_rows
    from fastjax.train.run import train_model

    output, _ = finished
    config = parse(TrainConfig, ["--config", str(output / "config.yaml"), "--resume", "auto"])[0]
    base = open_base(config.model)
    model = load_model(base.checkpoint, config.dtype)
    lora = load_adapter(model, output / "adapter")
    rows, eval_rows = load_rows(config.data, config, base), load_rows([{"text": "red"}], config, base)
    said: list[str] = []
    train_model(config, base, model, lora, rows, eval_rows, say=said.append)
    assert said[0] == str(rows.report) and said[1] == str(eval_rows.report)


def test_the_last_line_counts_the_steps_of_this_call():
    result = TrainResult(4, 2, 2.0, [{"step": 4, "loss": 1.5}], seconds=20.0)
    assert str(RunResult(result, Path("a"), None)) == "2 steps (3 to 4) in 20 s, loss 1.5000; saved in a"
    assert str(RunResult(TrainResult(4, 0, 2.0, [], seconds=9.0), Path("a"), None)) == "4 steps in 9 s; saved in a"


def test_training_goes_on_from_an_adapter_with_its_own_settings(finished, common, tmp_path, capsys):
    output, result = finished
    again = tmp_path / "again"
    settings = {**common, "adapter": output / "adapter", "output_dir": again, "per_device_train_batch_size": 12}
    assert train(flags(**settings, max_steps=1, learning_rate=0, report_to="none", json=True)) == 0
    # All rows in one step: the loss before its update is the evaluation's.
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(result["eval_loss"], abs=1e-5)
    assert not (again / "tensorboard").exists()
    config = json.loads((again / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and sorted(config["target_modules"]) == [
        "down_proj", "q_proj", "v_proj"
    ]  # fmt: skip
    assert yaml.safe_load((again / "config.yaml").read_text())["lora_r"] == 4


def test_full_fine_tuning_leaves_a_model_that_transformers_loads(common, tmp_path, rows, capsys):
    from transformers import AutoModelForCausalLM

    output = tmp_path / "full"
    settings = {**common, "method": "full", "output_dir": output, "eval_data": common["data"]}
    assert train(flags(**settings, max_steps=2, learning_rate=1e-3, json=True)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["saved"] == str(output / "model")
    _, report = AutoModelForCausalLM.from_pretrained(output / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    settings = {"model": output / "model", "data": common["data"], "dtype": "float32"}
    assert evaluate.main(flags(**settings, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(result["eval_loss"], abs=1e-5)


def test_overwriting_starts_anew_and_keeps_other_files(finished, common, tmp_path):
    output, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    (copy / "notes.txt").write_text("mine")
    config = ["--config", str(output / "config.yaml"), "--output_dir", str(copy), "--max_steps", "1"]
    assert train([*config, "--overwrite_output_dir"]) == 0
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["1"]
    assert (copy / "notes.txt").read_text() == "mine"

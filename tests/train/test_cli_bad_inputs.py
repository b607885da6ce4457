"""What people get wrong: two or three lines on stderr, exit code 2, and nothing half-written."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastjax import evaluate, export
from fastjax.__main__ import main as fastjax_command
from fastjax.train.__main__ import main as train


@pytest.fixture
def refused(capsys, tmp_path, model_folder, rows_file):
    """A function that gives flags to `fastjax train` over working ones, and looks at the refusal."""
    output = tmp_path / "out"

    def check(words: list[str], code: int = 2, main=train, **flags: object) -> str:
        settings = {"model": model_folder, "data": rows_file, "output_dir": output, **flags}
        existed = sorted(output.rglob("*")) if output.exists() else None
        argv = [f"--{name}={value}" for name, value in settings.items() if value is not None and value is not True]
        argv += [f"--{name}" for name, value in settings.items() if value is True]
        assert main(argv) == code
        error = capsys.readouterr().err
        message = error[error.index("error: ") :]
        for word in words:
            assert word in message
        assert "Traceback" not in error and len(message.splitlines()) <= 5
        assert (sorted(output.rglob("*")) if output.exists() else None) == existed
        return message

    return check


@pytest.fixture
def copy_of_model(model_folder, tmp_path):
    """A function that copies the model folder and applies changes to its JSON files."""

    def make(**changes: dict) -> Path:
        folder = Path(shutil.copytree(model_folder, tmp_path / "copy"))
        for name, values in changes.items():
            file = folder / f"{name}.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
        return folder

    return make


def test_a_missing_model(refused, tmp_path):
    refused([str(tmp_path / "none"), "no such"], model=tmp_path / "none")
    refused(["org/name", "hub"], model="org/name")
    refused(["config.json"], model=tmp_path)


def test_a_model_whose_weights_are_damaged(refused, copy_of_model):
    folder = copy_of_model()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused([str(file)], model=folder)
    file.unlink()
    refused(["model.safetensors"], model=folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    refused(["model-1.safetensors"], model=folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type", "gpt2"]),
        ({"qk_layernorm": True}, ["qk_layernorm"]),
        ({"num_hidden_layers": 3}, ["model.safetensors holds 2 layers", "num_hidden_layers=3"]),
    ],
)
def test_a_model_that_is_not_supported_or_does_not_fit_its_config(refused, copy_of_model, changes, words):
    refused(words, model=copy_of_model(config=changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"text": "fine"}\n{"text": \n', [":2", "broken JSON"]),
        ('{"text": "fine"}\n{"question": "x", "answer": "y"}\n', [":2", "question", "forms known"]),
        ("", ["no rows"]),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', [":1", "no assistant message", "skip_bad_rows"]),
        ('{"messages": [{"role": "wizard", "content": "x"}]}\n', [":1", "wizard"]),
    ],
)
def test_rows_that_cannot_be_used(refused, tmp_path, text, words):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    refused(["bad.jsonl", *words], data=file)


def test_a_missing_data_file(refused, tmp_path):
    refused(["none.jsonl", "no such data file"], data=tmp_path / "none.jsonl")
    refused(["none.jsonl"], eval_data=tmp_path / "none.jsonl")
    refused(["rows.docx"], data=_touch(tmp_path / "rows.docx"))


def test_chat_rows_without_a_chat_template(refused, copy_of_model):
    folder = copy_of_model()
    (folder / "chat_template.jinja").unlink()
    refused(["no chat template", "chat_template.jinja"], model=folder)


def test_token_ids_beyond_the_vocabulary(refused, copy_of_model):
    words = ["generation_config.json: eos_token_id", "must be a token id, a whole number from 0 to 199"]
    refused(words, model=copy_of_model(config={"vocab_size": 200}))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"target_modules": "wq"}, ["wq", "q_proj"]),
        ({"target_modules": ".*nothing.*"}, [".*nothing.*", "matches no module"]),
        ({"target_modules": "embed_tokens"}, ["embed_tokens", "embedding"]),
        ({"target_modules": "q_proj", "layers_to_transform": "7"}, ["layers_to_transform"]),
        ({"modules_to_save": "norm"}, ["norm"]),
        ({"rank_pattern": '{"k_poj": 4}'}, ["k_poj"]),
        ({"mesh": "data=99"}, ["data=99", "devices"]),
        ({"lora_r": "0"}, ["lora_r=0"]),
        ({"lr_scheduler_type": "constant", "warmup_steps": "3"}, ["constant_with_warmup"]),
        ({"resume": "nowhere"}, ["nowhere"]),
        ({"adapter": "nowhere"}, ["nowhere", "adapter_config.json"]),
    ],
)
def test_settings_that_fit_nothing(refused, flags, words):
    refused(words, **flags)


def test_an_output_folder_that_is_in_use(refused, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    _touch(output / "thesis.docx")
    refused(["not empty", "--resume", "--overwrite_output_dir"])
    refused(["no fastjax run wrote"], overwrite_output_dir=True)
    refused(["is a file"], output_dir=_touch(tmp_path / "file"))


def test_sources_inside_the_folder_to_overwrite(refused, tmp_path, rows_file):
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.yaml").write_text("# A fastjax run; `--config` takes this file.\n")
    shutil.copy(rows_file, output / "rows.jsonl")
    refused(["data=", "overwrite_output_dir would delete"], data=output / "rows.jsonl", overwrite_output_dir=True)


@pytest.mark.skipif(not os.path.ismount("/sys"), reason="needs a file system that refuses new folders")
def test_an_output_folder_that_cannot_be_made(refused):
    refused(["/sys"], output_dir="/sys/fastjax-run")


def test_an_unknown_flag_or_key_names_the_nearest(refused, tmp_path):
    refused(["unknown flag --learning_rte", "did you mean --learning_rate?"], learning_rte="1")
    file = tmp_path / "run.yaml"
    file.write_text("lora_rank: 8\n")
    refused(["run.yaml", "unknown key 'lora_rank'", "did you mean lora_r?"], config=file)


def test_settings_that_contradict_the_adapter_gone_on_from(refused, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    refused(["lora_r=16", "has 4", "leave lora_r out"], adapter=adapter, lora_r="16")
    refused(["target_modules", "q_proj"], adapter=adapter, target_modules="v_proj")
    refused(["adapter_model.safetensors"], adapter=adapter)


def test_weights_that_are_nan_are_exit_code_4(refused, copy_of_model):
    from safetensors.numpy import load_file, save_file

    folder = copy_of_model()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(["NaN"], code=4, model=folder, sample_prompt="red", dtype="float32")
    refused(["eval_loss is nan"], code=4, main=evaluate.main, output_dir=None, model=folder, dtype="float32")


def test_what_evaluate_refuses(refused, tmp_path):
    refused(["no such data file"], main=evaluate.main, output_dir=None, data=tmp_path / "none.jsonl")
    refused(["model is missing"], main=evaluate.main, output_dir=None, model=None)
    refused(["unknown flag --output_dir"], main=evaluate.main)


def test_what_export_refuses(refused, tmp_path, model_folder):
    def export_refused(words, **flags):
        refused(words, main=export.main, data=None, **flags)

    export_refused(["format='merged_8bit' is not one of", "merged_4bit"], format="merged_8bit")
    export_refused(["format=merged_4bit with load_in_4bit=False"], format="merged_4bit", no_load_in_4bit=True)
    export_refused(["format=base_4bit writes the base alone"], format="base_4bit", adapter=tmp_path)
    export_refused(["output_dir is missing"], output_dir=None)
    export_refused(["adapter_config.json"], adapter=tmp_path)
    output = tmp_path / "out"
    output.mkdir()
    _touch(output / "thesis.docx")
    export_refused(["not empty", "--overwrite_output_dir"])
    export_refused(["thesis.docx", "not replaced"], overwrite_output_dir=True)
    export_refused(["is read"], output_dir=model_folder, overwrite_output_dir=True)


def test_the_commands_under_one_name(capsys):
    assert fastjax_command(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err
    assert fastjax_command([]) == 2
    assert fastjax_command(["--help"]) == 0
    assert "evaluate" in capsys.readouterr().out
    assert fastjax_command(["train", "--modle", "x"]) == 2
    assert "did you mean --model?" in capsys.readouterr().err


def _touch(path: Path) -> Path:
    path.write_text("mine")
    return path

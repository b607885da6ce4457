"""Opening folders: single and sharded weights, indexes that lie, pickles and code that must not run."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.safetensors_io import read_safetensors, write_safetensors
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.checkpoint.tokenizer import load_tokenizer


@pytest.fixture
def folder(hf_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return shutil.copytree(hf_folder, tmp_path / "model")


@pytest.fixture
def sharded(tiny_hf: Callable, tmp_path: Path) -> Path:
    tiny_hf().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def edit_index(folder: Path, name: str, shard: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


def test_tensors_of_a_sharded_folder_are_those_that_transformers_saved(sharded: Path, tiny_hf: Callable) -> None:
    tensors = open_checkpoint(str(sharded)).tensors
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    for name, expected in tiny_hf().state_dict().items():
        assert tensors.info(name).shape == tuple(expected.shape) and tensors.info(name).dtype == "float32"
        assert np.array_equal(tensors.read(name), expected.numpy()), name


def test_a_missing_shard_is_named(sharded: Path) -> None:
    next(sharded.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(UserError, match="names the file model-00002-of-.*not in the folder"):
        open_checkpoint(str(sharded))


def test_a_tensor_that_the_index_names_and_the_shard_lacks_is_named(sharded: Path) -> None:
    edit_index(sharded, "model.layers.9.mlp.up_proj.weight", next(sharded.glob("model-00001-*")).name)
    with pytest.raises(
        UserError, match="says that model-00001-.* holds model.layers.9.mlp.up_proj.weight, and it does not"
    ):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/outside.safetensors", "a/../../outside.safetensors", "", "..\\x", "x" * 300, "a\0"],
)
def test_an_index_cannot_point_outside_its_folder(name: str, sharded: Path) -> None:
    write_safetensors(sharded.parent / "outside.safetensors", {"x": np.ones(1, np.float32)})
    edit_index(sharded, "x", name)
    with pytest.raises(UserError, match="not a plain name inside the folder"):
        open_checkpoint(str(sharded))


def test_an_index_that_is_no_map_of_names_is_refused(sharded: Path) -> None:
    for text, words in (("[]", "not an object"), ("{", "not JSON"), ('{"weight_map": {"a": 1}}', "no weight_map")):
        (sharded / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UserError, match=words):
            open_checkpoint(str(sharded))


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    write_safetensors(second, {**read_safetensors(second), **read_safetensors(first)})
    with pytest.raises(UserError, match="is in both"):
        open_checkpoint(str(sharded))


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return (open, (self.path, "w"))


def test_a_pickled_checkpoint_is_refused_with_advice_and_never_unpickled(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UserError, match="pytorch_model.bin, a pickle.*convert it to safetensors"):
        open_checkpoint(str(folder))
    assert not (tmp_path / "sprung").exists()


def test_code_beside_the_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w')\n"
    (folder / "evil.py").write_text(trap + "class Model: pass\nclass Tokenizer: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="auto_map"):
        load_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(folder)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_without_weights_says_which_names_were_looked_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="neither model.safetensors nor model.safetensors.index.json"):
        open_checkpoint(str(folder))
    (folder / "q4.gguf").touch()
    with pytest.raises(UserError, match="give .*q4.gguf as the model"):
        open_checkpoint(str(folder))


def test_a_config_that_is_not_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json is not JSON"):
        open_checkpoint(str(folder))


def test_an_invalid_generation_config_is_a_warning_when_the_model_is_opened(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.9, "eos_token_id": [2, 5]})
    )
    with pytest.warns(UserWarning, match="temperature=0.9 has no effect without do_sample"):
        checkpoint = open_checkpoint(str(folder))
    assert checkpoint.generation_config == {"do_sample": False, "temperature": 0.9, "eos_token_id": [2, 5]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "model.safetensors holds 2 layers, .*num_hidden_layers=1000000000"),
        ({"num_hidden_layers": 3}, "holds 2 layers"),
        ({"hidden_size": 10**7}, r"embed_tokens.weight has shape \[99, 32\], expected \[99, 10000000\]"),
        ({"vocab_size": 98}, r"has shape \[99, 32\], expected \[98, 32\]"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors_are_refused_when_the_model_is_opened(
    changes: dict, words: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=words):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("value", ["</s>", ["x"], [[1]], 10**30, 2.5, True, 99])
def test_end_tokens_in_the_generation_config_must_be_ids_of_the_vocabulary(value: object, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match="generation_config.json: eos_token_id.* must be a token id.* from 0 to 98"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors.index.json"])
def test_a_folder_where_a_file_belongs_is_refused_by_name(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(UserError, match=f"{name} cannot be read: Is a directory"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300, "a\0b", "\ud83d", "~nobody_has_this_name/model"])
def test_a_model_name_that_no_file_can_have_is_no_such_model(name: str) -> None:
    with pytest.raises(UserError):
        open_checkpoint(name)

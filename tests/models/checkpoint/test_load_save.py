"""Weights in and out against transformers: values, the cases of the head, wrong tensors, memory, atomic folders."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.safetensors_io import read_safetensors, write_safetensors
from fastjax.models.checkpoint.save import save_model
from fastjax.models.checkpoint.source import open_checkpoint
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM

IDS = np.random.default_rng(0).integers(0, 99, (2, 40))


def logits_of_torch(hf_model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return hf_model(torch.tensor(IDS)).logits.float().numpy()


@partial(jax.jit, static_argnums=0)
def _logits(graphdef: Any, state: Any, ids: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)(ids)


def logits(model: Any) -> np.ndarray:
    # Jitted on the tree's definition: tests whose models have one config share one compilation.
    return np.asarray(_logits(*nnx.split(model), IDS))


def load_hf(folder: Path) -> Any:
    """transformers' model of a folder, which has to load without a missing or unexpected key."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model


def edit(folder: Path, change: Callable[[dict], None], **config: Any) -> Path:
    """Changes the tensors and config.json of a folder in place."""
    tensors = read_safetensors(folder / "model.safetensors")
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


@pytest.fixture
def folder(hf_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(hf_folder, tmp_path / "model")


@pytest.fixture
def tied(tiny_hf: Callable, tmp_path: Path) -> tuple[Path, Any]:
    hf_model = tiny_hf(tie_word_embeddings=True)
    hf_model.save_pretrained(tmp_path / "tied")
    return tmp_path / "tied", hf_model


def test_logits_of_a_loaded_folder_are_those_of_transformers(hf_folder: Path) -> None:
    assert np.abs(logits(load_model(str(hf_folder), jnp.float32)) - logits_of_torch(load_hf(hf_folder))).max() < 1e-4


@pytest.mark.parametrize("file_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_half_precision_files_load_with_one_rounding(
    file_dtype: str, dtype: Any, tiny_hf: Callable, tmp_path: Path
) -> None:
    import torch

    hf_model = tiny_hf().to(getattr(torch, file_dtype))
    hf_model.save_pretrained(tmp_path / "m")
    model = load_model(str(tmp_path / "m"), dtype)
    weight = model.layers.mlp.down_proj.weight
    assert weight.dtype == dtype and model.dtype == dtype
    expected = hf_model.model.layers[1].mlp.down_proj.weight.detach().float().numpy().astype(dtype)
    assert np.array_equal(np.asarray(weight[1]), expected)


def test_float16_compute_is_refused_with_its_reason(hf_folder: Path) -> None:
    with pytest.raises(UserError, match="dtype=float16: .*no loss scaling"):
        load_model(str(hf_folder), jnp.float16)


def test_under_a_mesh_every_device_holds_the_weights(hf_folder: Path) -> None:
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    model = load_model(str(hf_folder), jnp.float32, mesh)
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(leaf.sharding.is_fully_replicated and leaf.sharding.mesh == mesh for leaf in leaves)
    assert np.array_equal(logits(model), logits(load_model(str(hf_folder), jnp.float32)))


def test_a_written_folder_gives_back_every_bit(folder: Path, tmp_path: Path) -> None:
    save_model(load_model(str(folder), jnp.float32), tmp_path / "out")
    before, after = read_safetensors(folder / "model.safetensors"), read_safetensors(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert np.array_equal(logits_of_torch(load_hf(folder)), logits_of_torch(load_hf(tmp_path / "out")))


def test_biases_and_explicit_head_size_survive_the_way_in_and_out(tiny_hf: Callable, tmp_path: Path) -> None:
    hf_model = tiny_hf(attention_bias=True, mlp_bias=True, head_dim=12, num_key_value_heads=1)
    hf_model.save_pretrained(tmp_path / "in")
    model = load_model(str(tmp_path / "in"), jnp.float32)
    assert np.abs(logits(model) - logits_of_torch(hf_model)).max() < 1e-4
    save_model(model, tmp_path / "out")
    assert np.array_equal(logits_of_torch(load_hf(tmp_path / "out")), logits_of_torch(hf_model))


def test_a_bfloat16_model_with_float32_weights_is_written_in_bfloat16_unless_told_otherwise(
    hf_folder: Path, tmp_path: Path
) -> None:
    config = ModelConfig.from_hf(json.loads((hf_folder / "config.json").read_text()))
    model = CausalLM(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.float32)  # as training in full does
    for dtype, written in ((None, "bfloat16"), (jnp.float32, "float32")):
        save_model(model, tmp_path / written, dtype=dtype)
        assert {array.dtype.name for array in read_safetensors(tmp_path / written / "model.safetensors").values()} == {
            written
        }
        assert json.loads((tmp_path / written / "config.json").read_text())["dtype"] == written


def test_mistral_keeps_its_window_and_model_type(tiny_hf: Callable, tmp_path: Path) -> None:
    hf_model = tiny_hf("mistral", sliding_window=7)
    hf_model.save_pretrained(tmp_path / "in")
    save_model(load_model(str(tmp_path / "in"), jnp.float32), tmp_path / "out")
    again = load_hf(tmp_path / "out")
    assert (again.config.model_type, again.config.sliding_window) == ("mistral", 7)
    assert np.array_equal(logits_of_torch(again), logits_of_torch(hf_model))


def test_config_json_has_old_and_new_spellings(tiny_hf: Callable, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    hf_model = tiny_hf(rope_parameters=rope)
    hf_model.save_pretrained(tmp_path / "in")
    save_model(load_model(str(tmp_path / "in"), jnp.float32), tmp_path / "out", dtype=jnp.bfloat16)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["rope_theta"] == 5e5 and config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_parameters"] == rope
    assert load_hf(tmp_path / "out").config.rope_parameters == rope
    # A file with only the older spelling means the same.
    del config["rope_parameters"]
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    assert load_hf(tmp_path / "out").config.rope_parameters == rope


# The head: tied without lm_head, tied with an equal one, untied with it, untied without it, tied with another one.


def test_a_tied_model_without_a_head_uses_its_embedding_and_is_written_without_one(tied: tuple, tmp_path: Path) -> None:
    folder, hf_model = tied
    assert "lm_head.weight" not in read_safetensors(folder / "model.safetensors")
    model = load_model(str(folder), jnp.float32)
    assert model.lm_head is None
    assert np.abs(logits(model) - logits_of_torch(hf_model)).max() < 1e-4
    save_model(model, tmp_path / "out")
    assert "lm_head.weight" not in read_safetensors(tmp_path / "out/model.safetensors")
    assert np.array_equal(logits_of_torch(load_hf(tmp_path / "out")), logits_of_torch(hf_model))


def test_a_tied_model_with_an_equal_head_is_the_same_model(tied: tuple) -> None:
    folder, hf_model = tied
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    model = load_model(str(folder), jnp.float32)
    assert model.lm_head is None
    assert np.abs(logits(model) - logits_of_torch(hf_model)).max() < 1e-4


def test_an_untied_model_without_a_head_is_an_error_that_names_it(folder: Path) -> None:
    edit(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(
        UserError, match=r"model.safetensors has no lm_head.weight, expected shape \[99, 32\].*tie_word"
    ):
        load_model(str(folder))


def test_a_tied_model_with_another_head_keeps_the_two_apart_as_transformers_does(tied: tuple, tmp_path: Path) -> None:
    folder, _ = tied
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][::-1] * 2}))
    with pytest.warns(UserWarning, match="lm_head.weight differs from model.embed_tokens.weight"):
        model = load_model(str(folder), jnp.float32)
    assert np.abs(logits(model) - logits_of_torch(load_hf(folder))).max() < 1e-4
    save_model(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert np.array_equal(logits_of_torch(load_hf(tmp_path / "out")), logits_of_torch(load_hf(folder)))


# Tensors that do not fit config.json.

UP = "model.layers.1.mlp.up_proj.weight"


def test_missing_extra_and_wrong_tensors_are_named_with_file_and_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    good = read_safetensors(path)

    def refused(change: Callable[[dict], Any], words: str) -> None:
        tensors = dict(good)
        change(tensors)
        write_safetensors(path, tensors)
        with pytest.raises(UserError, match=words) as caught:
            load_model(str(folder))
        assert str(path) in str(caught.value)

    refused(lambda t: t.pop(UP), rf"has no {UP}, expected shape \[48, 32\]$")
    refused(lambda t: [t.pop(name) for name in list(t) if "up_proj" in name], "and 1 more: " + UP)
    refused(lambda t: t.update({UP: t[UP].T}), rf"{UP} has shape \[32, 48\], expected \[48, 32\]")
    refused(lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[UP]}), "no place for model.layers.2.mlp.up_proj")
    refused(lambda t: t.update({UP: t[UP].astype(np.int8)}), f"{UP} has dtype int8")
    refused(
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}), "no place for .*bias"
    )


def test_rotary_buffers_of_old_checkpoints_are_let_pass(folder: Path) -> None:
    expected = logits(load_model(str(folder), jnp.float32))
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    edit(folder, lambda t: t.update(buffers | {"model.rotary_emb.inv_freq": np.ones(4, np.float32)}))
    assert np.array_equal(logits(load_model(str(folder), jnp.float32)), expected)


# Folders.


def test_weights_above_the_limit_become_shards_with_an_index(hf_folder: Path, tmp_path: Path) -> None:
    save_model(load_model(str(hf_folder), jnp.float32), tmp_path / "out", max_shard_bytes=20_000)
    shards = sorted(tmp_path.glob("out/model-*-of-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "out/model.safetensors").exists()
    assert all(shard.stat().st_size < 21_500 for shard in shards)
    assert np.array_equal(logits_of_torch(load_hf(tmp_path / "out")), logits_of_torch(load_hf(hf_folder)))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    held = sum(array.nbytes for shard in shards for array in read_safetensors(shard).values())
    assert index["metadata"]["total_size"] == held


def test_an_invalid_generation_config_is_carried_over_unchanged(hf_folder: Path, tmp_path: Path) -> None:
    invalid = {"do_sample": False, "temperature": 0.9, "eos_token_id": [2, 5]}
    save_model(load_model(str(hf_folder), jnp.float32), tmp_path / "out", generation_config=invalid)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == invalid


def test_a_folder_that_is_not_empty_is_kept_unless_told_otherwise(hf_folder: Path, tmp_path: Path) -> None:
    model = load_model(str(hf_folder), jnp.float32)
    (tmp_path / "out").mkdir()
    save_model(model, tmp_path / "out")
    for name in ("old", "model-00001-of-00002.safetensors"):
        (tmp_path / "out" / name).touch()
    with pytest.raises(UserError, match="not an empty folder"):
        save_model(model, tmp_path / "out")
    assert (tmp_path / "out/old").exists()
    save_model(model, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/old").exists()
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_save_that_fails_leaves_nothing(hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastjax.models.checkpoint import save

    def fail(*args: object) -> None:
        raise OSError("no space left on device")

    model = load_model(str(hf_folder), jnp.float32)
    monkeypatch.setattr(save, "write_safetensors", fail)
    with pytest.raises(OSError, match="no space"):
        save_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_adapters_is_not_saved_as_a_model(hf_folder: Path, tmp_path: Path) -> None:
    from fastjax.models.layers import Lora

    model = load_model(str(hf_folder), jnp.float32)
    model.layers.mlp.up_proj.lora = Lora(jnp.zeros((2, 4, 32)), jnp.zeros((2, 48, 4)), jnp.ones(2))
    with pytest.raises(UserError, match="has adapters .*merge them"):
        save_model(model, tmp_path / "out")
    with pytest.raises(UserError, match="dtype=int8"):
        save_model(model, tmp_path / "out", dtype=jnp.int8)


_MEASURE = """
import sys
import jax
import jax.numpy as jnp
from fastjax.models.checkpoint.load import load_model

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

load_model(sys.argv[1], jnp.float32)  # what jax and the compiled copies take
before = resident()
model = load_model(sys.argv[2], jnp.float32)
print(resident() - before)
"""


def test_loading_holds_one_copy_of_the_model_and_one_tensor(tmp_path: Path, tiny_hf: Callable) -> None:
    config = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "vocab_size": 256}
    big, small = tiny_hf(**config), tiny_hf(**{**config, "num_hidden_layers": 1})
    big.save_pretrained(tmp_path / "big")
    small.save_pretrained(tmp_path / "small")
    size = (tmp_path / "big/model.safetensors").stat().st_size
    assert size > 190e6
    root = str(Path(__file__).parents[3])
    grown = int(subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path / "small"), str(tmp_path / "big")],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout)  # fmt: skip
    assert grown < 1.25 * size, f"{grown / 1e6:.0f} MB for a model of {size / 1e6:.0f} MB"


def test_a_checkpoint_that_was_opened_before_is_loaded_from(hf_folder: Path) -> None:
    checkpoint = open_checkpoint(str(hf_folder))
    assert np.array_equal(logits(load_model(checkpoint, jnp.float32)), logits(load_model(str(hf_folder), jnp.float32)))

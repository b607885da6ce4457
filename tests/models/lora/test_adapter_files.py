"""Adapter folders: forms that are on people's disks, and those that are refused."""

import contextlib
import copy
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fastjax.errors import UserError
from fastjax.models import peft_config
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, adapted_modules, apply_lora, has_adapter
from fastjax.models.lora_config import plan_adapter
from fastjax.models.peft_config import config_from_peft
from fastjax.models.peft_io import load_adapter, save_adapter

PREFIX = "base_model.model.model.layers"
Q0 = f"{PREFIX}.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def hf_model(tiny_hf):
    return tiny_hf()


@pytest.fixture(scope="module")
def theirs(hf_model, peft_adapter, tmp_path_factory) -> Path:
    """A folder that PEFT wrote: rank 4 on q_proj, lm_head trained in full."""
    folder = tmp_path_factory.mktemp("theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
        peft_adapter(copy.deepcopy(hf_model), **settings).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(theirs, tmp_path) -> Path:
    """A copy of `theirs` that a test may spoil."""
    return Path(shutil.copytree(theirs, tmp_path / "adapter"))


@pytest.fixture(scope="module")
def base(hf_model, from_hf_model) -> CausalLM:
    return from_hf_model(hf_model)


@pytest.fixture
def model(base) -> CausalLM:
    """A tree of its own over the same arrays."""
    return nnx.clone(base)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(path)).items()}, path)


def factors(model: CausalLM, layer: int = 0) -> list[np.ndarray]:
    lora = model.layers.self_attn.q_proj.lora
    return [np.asarray(lora.lora_a[...])[layer], np.asarray(lora.lora_b[...])[layer]]


def head(model: CausalLM) -> np.ndarray:
    assert model.lm_head is not None
    return np.asarray(model.lm_head.weight[...])


def test_adapter_trained_further_starts_where_it_ended(theirs, model, tmp_path):
    config = load_adapter(model, theirs)
    save_adapter(model, config, tmp_path)
    before, after = (load_file(path / "adapter_model.safetensors") for path in (theirs, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 6, ("q_proj",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tensors_become_float32_exactly(folder, model, dtype):
    edit_tensors(folder, lambda tensors: {k: v.to(dtype) for k, v in tensors.items()})
    load_adapter(model, folder)
    written = load_file(folder / "adapter_model.safetensors")
    for ours, key in zip([*factors(model), head(model)], (f"{Q0}.lora_A", f"{Q0}.lora_B", "base_model.model.lm_head"),
                         strict=True):  # fmt: skip
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, written[f"{key}.weight"].float().numpy())


def test_keys_that_carry_the_adapters_name_load(theirs, folder, model, base):
    def rename(tensors):
        out = {k.replace("lora_A.", "lora_A.mine.").replace("lora_B.", "lora_B.mine."): v for k, v in tensors.items()}
        out["base_model.model.lm_head.modules_to_save.mine.weight"] = out.pop("base_model.model.lm_head.weight")
        return out

    plain = nnx.clone(base)
    load_adapter(plain, theirs)
    edit_tensors(folder, rename)
    load_adapter(model, folder)
    for ours, expected in zip([*factors(model), head(model)], [*factors(plain), head(plain)], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_settings_of_old_versions_of_peft_are_enough(folder, model):
    values = json.loads((folder / "adapter_config.json").read_text())
    old = ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "bias", "target_modules", "modules_to_save",
           "inference_mode", "fan_in_fan_out", "base_model_name_or_path", "init_lora_weights")  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({key: values[key] for key in old}))
    load_adapter(model, folder)
    assert adapted_modules(model) == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]


def test_names_of_other_architectures_in_target_modules_do_not_disturb(folder, model):
    edit_config(folder, target_modules=["q_proj", "query_key_value"])
    assert load_adapter(model, folder).target_modules == ("q_proj", "query_key_value")


def test_copy_of_the_base_head_that_peft_adds_is_accepted_only_if_it_is_the_base(
    tiny_hf, peft_adapter, from_hf_model, tmp_path
):
    hf_model = tiny_hf(tie_word_embeddings=True)
    ours, other = from_hf_model(hf_model), from_hf_model(tiny_hf(tie_word_embeddings=True, seed=5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_adapter(hf_model, target_modules=["lm_head"]).save_pretrained(tmp_path)
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / "adapter_model.safetensors")
    load_adapter(ours, tmp_path)
    assert adapted_modules(ours) == ["lm_head"]
    with pytest.raises(UserError, match="lm_head.base_layer.weight is another weight than the base model's"):
        load_adapter(other, tmp_path)


def test_all_linear_is_written_as_names_and_folder_is_otherwise_left_alone(model, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    config = LoraConfig(r=2, lora_alpha=4.0)
    apply_lora(model, config, jax.random.key(0))
    save_adapter(model, config, tmp_path)
    save_adapter(model, config, tmp_path)
    names = {"tokenizer.json", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    assert values["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert values["lora_alpha"] == 4 and isinstance(values["lora_alpha"], int)
    header = (tmp_path / "adapter_model.safetensors").read_bytes()
    assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["format"] == "pt"


def test_config_that_is_not_the_models_is_refused_on_save(model, tmp_path):
    apply_lora(model, LoraConfig(r=2, target_modules=["q_proj"]), jax.random.key(0))
    with pytest.raises(UserError, match="calls for rank 3 on model.layers.0.self_attn.q_proj.*has rank 2"):
        save_adapter(model, LoraConfig(r=3, target_modules=["q_proj"]), tmp_path)
    with pytest.raises(UserError, match="calls for rank 2 on model.layers.0.mlp.up_proj, and the model has none"):
        save_adapter(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported"),
        ({"peft_type": None}, "peft_type=None is not supported"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\]"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.weight"]}, "target_parameters"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"an_option_of_the_year_3000": 1}, "an_option_of_the_year_3000=1 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*changed the base model's weights"),
        ({"target_modules": None}, "target_modules=None names no module"),
        ({"rank_pattern": [1]}, r"rank_pattern=\[1\] is not dict"),
        ({"r": None}, "adapter_config.json: r=None has no meaning"),
        ({"lora_alpha": None}, "adapter_config.json: lora_alpha=None has no meaning"),
        ({"lora_alpha": 10**400}, "adapter_config.json: lora_alpha=1000.* must be a finite number"),
        ({"lora_dropout": True}, "lora_dropout=True is not int or float"),
        ({"bias": 1}, "bias=1 is not str"),
        ({"layers_to_transform": [0], "layers_pattern": "("}, r"adapter_config.json: '\(' is not a regular expression"),
        ({"layers_to_transform": [0], "layers_pattern": ["layers", "("]}, r"'\(' is not a regular expression"),
        ({"layers_to_transform": ["x"]}, "layers_to_transform='x' must be a whole number"),
        ({"rank_pattern": {"(?i)q": 4}}, r"'\(\?i\)q' is not a regular expression"),
        ({"rank_pattern": {"a{99999999999}": 4}}, "is not a regular expression"),
        ({"r": 8}, r"q_proj.lora_A.weight has shape \[4, 32\], expected \[8, 32\] \(rank 8"),
        ({"target_modules": ["v_proj"]}, "lora_A.weight.*and 1 more match nothing that adapter_config.json calls for"),
        ({"target_modules": ["q_proj", "v_proj"]}, "v_proj has no tensors, and adapter_config.json calls for"),
        ({"target_modules": ["fc1"]}, "'fc1' matches no module"),
        ({"modules_to_save": None}, "lm_head.weight is another weight than the base model's"),
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, "no weight of model.embed_tokens"),
    ],
)
def test_adapter_that_would_compute_something_else_is_refused(folder, model, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        load_adapter(model, folder)
    assert not has_adapter(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != f"{Q0}.lora_B.weight"}, "0.self_attn.q_proj has no lora_B"),
        (lambda t: {k.removeprefix("base_model."): v for k, v in t.items()}, "a PEFT adapter begin with base_"),
        (lambda t: t | {f"{Q0}.lora_magnitude_vector": torch.ones(32)}, "lora_magnitude_vector.*belong to DoRA"),
        (lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 99)}, "on embeddings"),
        (lambda t: t | {f"{PREFIX}.2.self_attn.q_proj.lora_A.weight": torch.ones(4, 32)}, "layers.2.* match nothing"),
        (lambda t: t | {f"{Q0}.lora_A.two.weight": torch.ones(4, 32)}, "are for the same module"),
        (lambda t: t | {"base_model.model.lm_head.weight": torch.ones(100, 32)}, r"\[100, 32\], expected \[99, 32\]"),
        (lambda t: t | {f"{Q0}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)}, "has dtype int8"),
        (lambda t: {k: v for k, v in t.items() if "lm_head" not in k}, "no weight of lm_head, which modules_to_save"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(folder, model, change, message):
    edit_tensors(folder, change)
    with pytest.raises(UserError, match=message):
        load_adapter(model, folder)
    assert not has_adapter(model)


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_pickled_adapter_is_refused_and_never_unpickled(folder, model, tmp_path):
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(_Touch(tmp_path / "ran")))
    with pytest.raises(UserError, match="adapter_model.bin only, a pickle.*save it again"):
        load_adapter(model, folder)
    assert not (tmp_path / "ran").exists()


def test_folder_without_adapter_or_with_a_broken_one_is_refused(folder, model, tmp_path):
    with pytest.raises(UserError, match="has no adapter_config.json"):
        load_adapter(model, tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(UserError, match="adapter_model.safetensors"):
        load_adapter(model, folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="has no adapter_model.safetensors"):
        load_adapter(model, folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_adapter(model, folder)


TINY = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
ABSTRACT = CausalLM.abstract(ModelConfig.from_hf(TINY))
EDGES = [True, False, 0, 1, -1, 0.5, 2.0, 10**400, "", "x", "(", "(a)", [], {}, ["q_proj"], {"q_proj": 4}, "layers"]
VALUES = st.sampled_from(EDGES) | st.none() | st.floats() | st.integers() | st.text(max_size=4)
JSON = VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.sampled_from(sorted(peft_config._SHARED + tuple(peft_config._NEUTRAL))), JSON, max_size=4))
def test_any_json_value_under_any_key_of_an_adapter_is_read_or_refused(changes):
    values = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "up_proj"], **changes}
    with contextlib.suppress(UserError):
        plan_adapter(config_from_peft(values, Path("adapter_config.json")), ABSTRACT, strict=False)

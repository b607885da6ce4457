"""remat=auto in whole runs: the same losses as without a budget, and what is said where there is too little memory."""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax import devices
from fastjax.errors import DeviceMemoryError
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, apply_lora
from fastjax.train import steps
from fastjax.train.config import TrainConfig
from fastjax.train.data import DataReport, TokenisedDataset
from fastjax.train.data.tokenise import TokenRow
from fastjax.train.loop import Trainer
from fastjax.train.plan import auto

CONFIG = ModelConfig.from_hf({
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
})  # fmt: skip
LORA = LoraConfig(r=2, lora_alpha=4)


def train(folder, said=None, **settings):
    model = apply_lora(CausalLM(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32), LORA, jax.random.key(0))
    rng = np.random.default_rng(0)
    rows = [TokenRow(rng.integers(1, 61, 16, dtype=np.int32), np.arange(16) > 4) for _ in range(6)]
    common = {
        "method": "lora", "max_seq_length": 16, "max_steps": 2, "learning_rate": 1e-3, "report_to": "none",
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    config = TrainConfig(output_dir=str(folder), **{**common, **settings})
    say = print if said is None else said.append
    return Trainer(model, config, TokenisedDataset(rows, DataReport("made here")), lora=LORA, say=say).train()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTJAX_CACHE", str(tmp_path / "cache"))


def test_a_budget_changes_no_loss_and_its_plan_is_remembered(tmp_path, monkeypatch):
    free = train(tmp_path / "free")
    said: list[str] = []
    planned = train(tmp_path / "planned", said, memory_budget_gib=0.01)
    assert any("remat=2*no_matmul: peak 0.00 GiB" in text for text in said)
    losses = [[line["loss"] for line in run.log_history] for run in (free, planned)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    (file,) = (tmp_path / "cache" / "plans").iterdir()
    content = json.loads(file.read_text())

    known: list[str] = []
    choose = auto.choose_plan

    def spy(*args, **kwargs):
        known.append(str(kwargs["known"][0]))
        return choose(*args, **kwargs)

    monkeypatch.setattr(auto, "choose_plan", spy)
    file.write_text(json.dumps(content | {"plan": "2*full"}))
    again = train(tmp_path / "again", said, memory_budget_gib=0.01)
    # Its peak is another than the file says, so there was a search, and the file is right again.
    assert known == ["2*full"] and json.loads(file.read_text()) == content
    assert [line["loss"] for line in again.log_history] == losses[1]


def test_too_small_a_budget_ends_with_exit_code_3_and_says_what_would_fit(tmp_path):
    with pytest.raises(DeviceMemoryError) as error:
        train(tmp_path / "run", memory_budget_gib=1e-4)
    assert error.value.exit_code == 3
    text = str(error.value)
    assert re.search(r"a step of 32 tokens needs 0\.00 GiB, 0\.00 more than the budget of 0\.00 allows", text)
    assert "hold the base in 4 bit: --method qlora" in text and "--optim adamw_8bit" in text


def test_memory_that_ends_while_compiling_is_told_with_numbers(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while compiling")

    monkeypatch.setattr(steps, "make_train_step", lambda *args, **kwargs: SimpleNamespace(lower=full))
    with pytest.raises(DeviceMemoryError) as error:
        train(tmp_path / "run", memory_budget_gib=1, max_seq_length=1 << 22)
    text = str(error.value)
    assert error.value.exit_code == 3 and "while compiling\n" in text
    assert re.search(r"--remat full or offload \(it is auto\), about \d+\.\d\d GiB less", text)
    assert re.search(r"--per_device_train_batch_size 1 .* is the same step, about \d+\.\d\d GiB less", text)
    assert re.search(r"max_seq_length smaller \(it is 4194304; 2097152 takes about \d+\.\d\d GiB less\)", text)


def test_a_gpu_gets_its_compilation_cache_and_nearly_all_of_its_memory_unless_the_user_says_otherwise(
    monkeypatch, tmp_path
):
    names = ("JAX_COMPILATION_CACHE_DIR", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "has_nvidia_device", lambda: True)
    devices.choose_platform()
    environment = devices.os.environ
    assert environment[names[0]] == str(tmp_path / "cache" / "xla") and environment[names[1]] == "0.92"
    for name, value in zip(names, ("elsewhere", None, "false"), strict=True):
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    devices.choose_platform()
    assert environment[names[0]] == "elsewhere" and names[1] not in environment

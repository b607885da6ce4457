"""The embedding's table in host memory: the same losses, an unchanged model, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.lora import LoraConfig, apply_lora
from fastjax.models.quant_config import QuantConfig
from fastjax.train.config import TrainConfig
from fastjax.train.data import DataReport, TokenisedDataset
from fastjax.train.data.tokenise import TokenRow
from fastjax.train.host_embedding import check_offload
from fastjax.train.loop import Trainer
from fastjax.train.memory import Need, savings
from fastjax.train.plan.abstract import AbstractRun

KEYS = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CONFIG = ModelConfig.from_hf(KEYS)
TIED = ModelConfig.from_hf(KEYS | {"tie_word_embeddings": True})
LORA = LoraConfig(r=2, lora_alpha=4)


def trained(folder, **settings):
    """Loss and eval_loss of two steps of two micro-batches, and the model."""
    model = apply_lora(CausalLM(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32), LORA, jax.random.key(0))
    rng = np.random.default_rng(0)
    rows = [TokenRow(rng.integers(1, 61, n, dtype=np.int32), np.arange(n) > 4) for n in (16, 9, 12, 16, 14, 16, 8, 11)]
    data = TokenisedDataset(rows, DataReport("made here"))
    config = TrainConfig(
        output_dir=str(folder), method="lora", max_seq_length=16, max_steps=2, learning_rate=1e-3, report_to="none",
        gradient_accumulation_steps=2, **settings,
    )  # fmt: skip
    tables = []
    look = lambda model, *_: tables.append(np.asarray(model.embed_tokens.weight[...]))  # noqa: E731
    run = Trainer(model, config, data, data, lora=LORA, start=look, finish=look)
    before = np.asarray(model.embed_tokens.weight[...])
    lines = run.train().log_history
    for table in (*tables, model.embed_tokens.weight[...]):
        np.testing.assert_array_equal(before, table)
    assert len(tables) == 2 and isinstance(model.embed_tokens.weight.get_value(), jax.Array)
    return [line.get("loss", line.get("eval_loss")) for line in lines]


def test_a_run_with_the_table_in_host_memory_has_the_same_losses(tmp_path):
    losses = trained(tmp_path / "host", offload_embedding=True)
    assert len(losses) == 3
    np.testing.assert_allclose(losses, trained(tmp_path / "device"), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ({"method": "full"}, CONFIG, "method=full trains the embedding"),
        ({"modules_to_save": ("embed_tokens",)}, CONFIG, "modules_to_save trains embed_tokens"),
        ({}, TIED, "head is its embedding"),
        ({"mesh": "data=2"}, CONFIG, "mesh='data=2': it works on one device only"),
    ],
)
def test_a_table_that_the_device_needs_stays_there(settings, model, words):
    with pytest.raises(UserError, match=f"offload_embedding: .*{words}"):
        check_offload(TrainConfig(offload_embedding=True, **settings), model)
    check_offload(TrainConfig(**settings), model)


def test_the_plan_counts_a_table_less_and_lists_it_among_the_remedies():
    common = {"method": "qlora", "dtype": jnp.bfloat16, "lora": LORA, "quantization": QuantConfig()}
    here, there = (AbstractRun.make(CONFIG, **common, offload_embedding=wanted) for wanted in (False, True))
    assert here.num_bytes["weights"] - there.num_bytes["weights"] == 61 * 32 * 2
    for model, offered in ((CONFIG, True), (TIED, False)):
        need = Need.of(TrainConfig(), model, here.trainable, here.optimizer, 2)
        assert any("--offload_embedding" in way for way in savings(TrainConfig(), need)) == offered

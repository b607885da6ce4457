"""What a step holds at once, from the compiler's own account; nothing is run."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.train.mesh import make_mesh
from fastjax.train.step import make_eval_step

VOCAB, ROWS, LENGTH = 128_000, 8, 512
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip


def test_evaluation_never_holds_full_logits():
    model = CausalLM.abstract(ModelConfig.from_hf(CONFIG), dtype=jnp.bfloat16)
    graphdef, trainable, frozen = nnx.split(model, nnx.Param, ...)
    shape = (1, ROWS, LENGTH)
    batch = {
        "input_ids": jax.ShapeDtypeStruct(shape, jnp.int32),
        "loss_mask": jax.ShapeDtypeStruct(shape, jnp.bool),
        "segment_ids": jax.ShapeDtypeStruct(shape, jnp.int32),
    }
    memory = make_eval_step(graphdef, mesh=make_mesh()).lower(trainable, frozen, batch).compile().memory_analysis()
    if memory is None:
        pytest.skip("this backend gives no account of its memory")
    assert memory.temp_size_in_bytes < ROWS * LENGTH * VOCAB * 4

"""One device and several give the same step; what a batch needs is never gathered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fastjax.errors import UserError
from fastjax.train.mesh import make_mesh

# One step of LoRA with dropout, a head adapter (whose gradient would double if it were summed twice) and rows of
# unequal length, then an evaluation, on 1, 2 and 8 devices.
SCRIPT = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import LoraParam
from fastjax.models.lora import LoraConfig, apply_lora
from fastjax.train.evaluate import evaluate
from fastjax.train.mesh import make_mesh, put_batch, replicated
from fastjax.train.optim import make_optimizer
from fastjax.train.step import make_eval_step, make_train_step

config = ModelConfig.from_hf({"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False})
rng = np.random.default_rng(0)
inside = np.arange(24) < np.array([24, 3, 17, 9, 24, 5, 12, 0])[:, None]
batch = {"input_ids": np.where(inside, rng.integers(1, 61, inside.shape, dtype=np.int32), 0)[None],
    "loss_mask": inside[None], "segment_ids": inside.astype(np.int32)[None]}
lora = LoraConfig(r=2, lora_dropout=0.3, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
out = []
for devices in (1, 2, 8):
    mesh = make_mesh(devices)
    model = apply_lora(CausalLM(config, rngs=nnx.Rngs(0), dtype=jnp.float32), lora, jax.random.key(1))
    graphdef, trainable, frozen = nnx.split(model, LoraParam, ...)
    trainable, frozen, rng = jax.device_put((trainable, frozen, jax.random.key(0)), replicated(mesh))
    # Plain gradient descent: Adam would hide a factor.
    optimizer = make_optimizer(lambda step: 0.1, max_grad_norm=0)
    opt_state = jax.jit(optimizer.init, out_shardings=replicated(mesh))(trainable)
    placed = put_batch(batch, mesh)
    compiled = make_train_step(graphdef, optimizer, mesh=mesh).lower(
        trainable, opt_state, frozen, placed, rng).compile()
    gathered = re.findall(r"all-gather[^\\n]*", compiled.as_text())
    after, opt_state, metrics = compiled(trainable, opt_state, frozen, placed, rng)
    moments = [np.asarray(leaf, np.float64).ravel()[:50].tolist() for leaf in jax.tree.leaves(opt_state)]
    result = evaluate(make_eval_step(graphdef, mesh=mesh), after, frozen, [batch], mesh=mesh)
    out.append({"gathered": gathered, "moments": moments, "eval": [result.loss, result.num_target_tokens],
        **{k: float(v) for k, v in metrics.items()}})
print(json.dumps(out))
"""


def test_one_two_and_eight_devices_agree_and_no_activation_is_gathered():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, *others = json.loads(done.stdout)
    assert one["num_target_tokens"] == 23 + 2 + 16 + 8 + 23 + 4 + 11 == one["eval"][1]
    for other in others:
        assert other["gathered"] == []
        for key in ("loss_sum", "grad_norm", "num_target_tokens", "num_tokens", "eval"):
            np.testing.assert_allclose(other[key], one[key], rtol=2e-6, err_msg=key)
        # Adam's first moment is a tenth of the gradient: a doubled one would show.
        for ours, theirs in zip(other["moments"], one["moments"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)


def test_more_devices_than_there_are_is_refused():
    have = len(jax.devices())
    with pytest.raises(UserError, match=f"data={have + 3} needs {have + 3} devices and there are {have}"):
        make_mesh(have + 3)


def test_axes_are_auto():
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}

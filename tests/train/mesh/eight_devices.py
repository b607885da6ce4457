"""Training runs on meshes of eight virtual devices, beside one device: run by the tests in a process of its own.

python eight_devices.py '[{"method": "lora", "mesh": [2, 2, 2]}, ...]'     prints one JSON object a line
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastjax.kernels.nf4 import quantize
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import Linear
from fastjax.models.lora import LoraConfig, apply_lora, split_trainable
from fastjax.models.quantized import QuantizedParam
from fastjax.train.evaluate import evaluate
from fastjax.train.mesh import (
    frozen_shardings,
    make_mesh,
    put_batch,
    replicated,
    state_shardings,
    trained_shardings,
)
from fastjax.train.optim import make_optimizer
from fastjax.train.plan.collectives import collective_bytes
from fastjax.train.step import make_eval_step, make_train_step

# Fewer key/value heads than tensor ranks, and key/value projections whose nested blocks of 256 straddle the ranks.
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 512, "head_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "attention_bias": True, "pad_token_id": 0,
    }
)  # fmt: skip
NUM_STEPS = 5
ROWS, SEQ = 8, 12


def model(method: str) -> CausalLM:
    config = CONFIG
    made = CausalLM(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    if method == "qlora":
        for _, linear in list(nnx.iter_modules(made.layers)):
            if isinstance(linear, Linear):
                linear.weight = QuantizedParam(jax.jit(jax.vmap(lambda weight: quantize(weight)))(linear.weight[...]))
    if method != "full":
        targets = "all-linear" if method == "lora" else ["q_proj", "v_proj", "down_proj", "lm_head"]
        lora = LoraConfig(r=2, lora_alpha=2, lora_dropout=0.3, target_modules=targets)
        apply_lora(made, lora, jax.random.key(1))
    return made


def batch(step: int, case: dict) -> dict[str, np.ndarray]:
    """Rows of unequal length and target counts; the last batch is short: most of its rows are padding."""
    rng = np.random.default_rng(step)
    num_micro = case.get("accumulation", 1)
    shape = (num_micro, ROWS, SEQ)
    lengths = rng.integers(1, SEQ + 1, shape[:2])
    if step == NUM_STEPS - 1:
        lengths[:, 3:] = 0
    inside = np.arange(SEQ) < lengths[..., None]
    arrays = {
        "input_ids": np.where(inside, rng.integers(1, 64, shape, dtype=np.int32), 0),
        "loss_mask": inside & (rng.random(shape) < 0.7),
        "segment_ids": inside.astype(np.int32),
    }
    if case.get("packed"):
        second = np.arange(SEQ) >= lengths[..., None] // 2
        arrays["segment_ids"] = np.where(inside, 1 + second, 0).astype(np.int32)
        begin = np.where(second, lengths[..., None] // 2, 0)
        arrays["positions"] = np.where(inside, np.arange(SEQ) - begin, 0).astype(np.int32)
    return arrays


def train(case: dict) -> dict:
    """Loss and gradient norm of every step, the trained leaves, an evaluation, and what each device holds."""
    method, mesh = case["method"], make_mesh(*case["mesh"])
    graphdef, trainable, frozen = split_trainable(model(method), method)
    places = trained_shardings(CONFIG, mesh, trainable)
    trainable = jax.device_put(trainable, places)
    frozen = jax.device_put(frozen, frozen_shardings(CONFIG, mesh, frozen))
    # Where a gradient is as small as Adam's usual 1e-8, its rounding moves a weight by 1e-5: trained tables have such.
    optimizer = make_optimizer(lambda step: 1e-3, optim=case.get("optim", "adamw"), adam_epsilon=1e-6)
    shapes = jax.eval_shape(optimizer.init, trainable)
    opt_state = jax.jit(optimizer.init, out_shardings=state_shardings(CONFIG, mesh, shapes, trainable))(trainable)
    step = make_train_step(graphdef, optimizer, mesh=mesh, remat=case.get("remat", "none"))
    rng = jax.device_put(jax.random.key(3), replicated(mesh))
    arguments = (trainable, opt_state, frozen, put_batch(batch(0, case), mesh), rng)
    # It takes no arrays that lie elsewhere: the results of one step are what the next one takes.
    compiled = step.lower(*arguments).compile()
    exchanged = collective_bytes(compiled.as_text())
    losses, norms = [], []
    for number in range(NUM_STEPS):
        data = put_batch(batch(number, case), mesh)
        trainable, opt_state, metrics = compiled(trainable, opt_state, frozen, data, rng)
        losses.append(float(metrics["loss_sum"]) / int(metrics["num_target_tokens"]))
        norms.append(float(metrics["grad_norm"]))
    assert [leaf.sharding for leaf in jax.tree.leaves(trainable)] == jax.tree.leaves(places)
    rows = [{name: array[:1] for name, array in batch(9, case).items()}]
    result = evaluate(make_eval_step(graphdef, mesh=mesh), trainable, frozen, rows, mesh=mesh)
    assert result is not None
    flat = jax.tree_util.tree_flatten_with_path(trainable)[0]
    return {
        "losses": losses,
        "norms": norms,
        "eval": [result.loss, result.num_target_tokens],
        # The softmax does not see a bias of all keys: its gradient is rounding noise, which Adam blows up.
        "leaves": [np.asarray(x) for path, x in flat if "k_proj']['bias" not in jax.tree_util.keystr(path)],
        "exchanged": {" ".join(key): size for key, size in exchanged.items()},
        "held": sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((trainable, frozen))),
    }


def differences(one: dict, other: dict) -> dict:
    """Relative differences of the figures, the largest of the leaves' absolute ones, and the held bytes' ratio."""
    relative = {
        name: float(np.max(np.abs(np.array(other[name]) / np.array(one[name]) - 1)))
        for name in ("losses", "norms", "eval")
    }
    leaves = max(float(np.max(np.abs(a - b))) for a, b in zip(one["leaves"], other["leaves"], strict=True))
    return {**relative, "leaves": leaves, "held": other["held"] / one["held"], "exchanged": other["exchanged"]}


if __name__ == "__main__":
    baselines: dict[str, dict] = {}
    for case in json.loads(sys.argv[1]):
        alone = {**case, "mesh": [1, 1, 1], "remat": "none"}
        key = json.dumps(alone, sort_keys=True)
        if key not in baselines:
            baselines[key] = train(alone)
        print(json.dumps(differences(baselines[key], train(case))), flush=True)

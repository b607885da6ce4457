"""A QLoRA run that is loaded onto one mesh of eight devices, saved, and restored onto another; in a process of its own.

python moves.py HF_FOLDER WORK_FOLDER     prints one JSON object
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from fastjax.models.checkpoint.load import load_model
from fastjax.models.checkpoint.save import save_model
from fastjax.models.generation import generate
from fastjax.models.lora import LoraConfig, apply_lora, split_trainable
from fastjax.models.peft_io import save_adapter
from fastjax.models.quant_config import QuantConfig
from fastjax.train.mesh import frozen_shardings, make_mesh, put_batch, replicated, state_shardings, trained_shardings
from fastjax.train.optim import make_optimizer
from fastjax.train.state import CheckpointStore, TrainState, restore
from fastjax.train.step import make_train_step

LORA = LoraConfig(r=2, lora_alpha=2)
OPTIMIZER = make_optimizer(lambda step: 1e-2)
# One weight stays float in one layer: its stack is mixed.
QUANTIZATION = QuantConfig(skip_modules=("model.layers.1.mlp.up_proj",))


def state_on(model, mesh):
    """(graphdef, frozen, TrainState) of a model with adapters, on a mesh."""
    graphdef, trainable, frozen = split_trainable(model, "qlora")
    trainable = jax.device_put(trainable, trained_shardings(model.config, mesh, trainable))
    frozen = jax.device_put(frozen, frozen_shardings(model.config, mesh, frozen))
    shapes = jax.eval_shape(OPTIMIZER.init, trainable)
    places = state_shardings(model.config, mesh, shapes, trainable)
    opt_state = jax.jit(OPTIMIZER.init, out_shardings=places)(trainable)
    rng = jax.device_put(jax.random.key(7), replicated(mesh))
    return graphdef, frozen, TrainState(trainable, opt_state, rng, 0, {})


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def main(source: str, work: Path) -> dict:
    first, second = make_mesh(1, 4, 2), make_mesh(2, 1, 4)
    alone = load_model(source, "float32", quantization=QUANTIZATION)
    model = load_model(source, "float32", first, quantization=QUANTIZATION)
    leaves = jax.tree.leaves(nnx.state(model))
    found: dict = {"loaded_bytes_equal": same(nnx.state(alone), nnx.state(model))}
    codes = model.layers.mlp.gate_proj.weight.get_value().codes
    found["part_of_codes"] = codes.addressable_shards[0].data.size / codes.size
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    found["held"] = held / sum(leaf.nbytes for leaf in leaves)

    apply_lora(model, LORA, jax.random.key(1))
    graphdef, frozen, state = state_on(model, first)
    step = make_train_step(graphdef, OPTIMIZER, mesh=first)
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 64, (1, 8, 12), dtype=np.int32)
    batch = {"input_ids": ids, "loss_mask": np.ones(ids.shape, bool), "segment_ids": np.ones(ids.shape, np.int32)}
    trainable, opt_state, _ = step(state.trainable, state.opt_state, frozen, put_batch(batch, first), state.rng)
    nnx.update(model, trainable, frozen)
    trained = TrainState(trainable, opt_state, state.rng, 1, {"data": 3})
    saved = CheckpointStore(work / "checkpoints").save(trained, {"seed": 1})

    other = apply_lora(load_model(source, "float32", second, quantization=QUANTIZATION), LORA, jax.random.key(2))
    _, other_frozen, template = state_on(other, second)
    restored = restore(saved, template, {"seed": 1})
    found["restored_equal"] = same((trainable, opt_state), (restored.trainable, restored.opt_state))
    places = [leaf.sharding for leaf in jax.tree.leaves(template.opt_state)]
    found["restored_placed"] = [leaf.sharding for leaf in jax.tree.leaves(restored.opt_state)] == places
    nnx.update(other, restored.trainable, other_frozen)

    apply_lora(alone, LORA, jax.random.key(2))
    whole = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), trainable)
    nnx.update(alone, whole)
    models = {"alone": alone, "first": model, "second": other}
    prompts = [[5, 9, 11], [7, 1, 2, 3, 4]]
    answers = {name: generate(each, prompts, max_new_tokens=6) for name, each in models.items()}
    found["answers_equal"] = answers["alone"] == answers["first"] == answers["second"]
    for name, each in models.items():
        save_adapter(each, LORA, work / name / "adapter", "base")
        save_model(each, work / name / "merged", form="merged")
    for kind in ("adapter", "merged"):
        written = [files(work / name / kind) for name in models]
        found[f"{kind}_equal"] = written[0] == written[1] == written[2]
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))

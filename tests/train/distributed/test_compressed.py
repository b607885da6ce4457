"""The compressed sum against the exact one on eight virtual devices, and what it sends, as the compiled text says."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.config import ModelConfig
from fastjax.models.decoder import CausalLM
from fastjax.plan import PlanConfig
from fastjax.train.config import TrainConfig
from fastjax.train.resume import differences, fingerprint
from fastjax.train.run import run

SCRIPT = """
import json
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from fastjax.train.compressed import compressed_sums, no_residual

mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
axes, num = ("data", "fsdp"), 5000
draw = np.random.default_rng(0)
x = (draw.normal(size=(8, num)) * np.exp(draw.normal(-3, 2, (8, 1)))).astype(np.float32)
exact = x.astype(np.float64).sum(0)
out = {}
for bits in (8, 4):
    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(axes), P(axes)), out_specs=(P(axes), P(axes)), check_vma=False)
    def step(x, residual):
        (total,), (after,) = compressed_sums([x[0]], [jax.tree.map(lambda r: r[0], residual)], axes, bits)
        return total[None], jax.tree.map(lambda r: r[None], after)

    residual = no_residual(num, 8, 8)
    text = step.lower(x, residual).compile().as_text()
    totals, errors = [], []
    for _ in range(64):
        total, residual = step(x, residual)
        total = np.asarray(total, np.float64)
        assert (total == total[0]).all()
        totals.append(total[0])
    padded = np.pad(x, ((0, 0), (0, 6144 - num))).reshape(8, -1, 256).astype(np.float64)
    half = 1 / (2 * (127 if bits == 8 else 7))
    sent = np.abs(padded).max(-1).sum(0) * half
    bound = sent + (np.abs(padded.sum(0)).max(-1) + sent) * half
    out[bits] = {
        "first": float((np.abs(totals[0] - exact) / np.repeat(bound, 256)[:num]).max()),
        "mean_8": float(np.abs(np.mean(totals[:8], 0) - exact).max()),
        "mean_64": float(np.abs(np.mean(totals, 0) - exact).max()),
        "one": float(np.abs(totals[0] - exact).max()),
        "text": text,
    }
print(json.dumps(out))
"""
_BYTES = {"s8": 1, "f32": 4, "u8": 1}


def sent_bytes(text: str) -> int:
    """Bytes that a device gives to others: of an all-to-all and of an all-gather 7/8 of the result, of eight ranks."""
    total = 0
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?\S+ = (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter)\(", line)
        if not found:
            continue
        assert found[2] in ("all-to-all", "all-gather"), line
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", found[1]):
            size = 1
            for part in shape.split(","):
                size *= int(part or 1)
            total += size * _BYTES[dtype] * 7 // 8
    return total


@pytest.fixture(scope="module")
def measured() -> dict:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("bits", ["8", "4"])
def test_one_sum_is_within_half_a_step_of_every_rounding(measured: dict, bits: str) -> None:
    assert 0.05 < measured[bits]["first"] <= 1.0001


@pytest.mark.parametrize("bits", ["8", "4"])
def test_the_mean_of_many_sums_is_the_exact_one(measured: dict, bits: str) -> None:
    # What is left over is bounded, so the error of the mean falls as one over the number of steps.
    found = measured[bits]
    assert found["mean_8"] < found["one"] / 3
    assert found["mean_64"] < found["mean_8"] / 4


def test_bytes_on_the_wire(measured: dict) -> None:
    exact = 2 * 6144 * 4 * 7 // 8  # a ring's reduce-scatter and all-gather of float32
    for bits, share in (("8", 1 / 4), ("4", 1 / 8)):
        sent = sent_bytes(measured[bits]["text"])
        # The scales are 4 bytes to 256 numbers.
        assert sent == pytest.approx(exact * (share + 1 / 256), rel=1e-3)
        print(f"int{bits}: {sent} bytes a device, float32: {exact}")


# Full fine-tuning on a mesh of eight devices; two steps more after a resume equal as many without one.
TRAINING = """
import json, sys
from pathlib import Path
from fastjax.train.__main__ import main
model, rows, folder, names = sys.argv[1:]

def run(name, compression, steps, *more, mesh="data=8"):
    flags = {
        "model": model, "data": rows, "output_dir": f"{folder}/{name}", "method": "full", "dtype": "float32",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_seq_length": 64, "mesh": mesh,
        "learning_rate": 1e-3, "lr_scheduler_type": "constant", "report_to": "none", "max_steps": steps,
        "grad_compression": compression,
    }
    flags = [*(f"--{key}={value}" for key, value in flags.items()), *more]
    assert main(flags) == 0
    lines = Path(folder, name, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]

out = {name: run(name, name, 12) for name in names.split(",")}
if "int4" in out:
    run("resumed", "int4", 10)
    out["resumed"] = run("resumed", "int4", 12, "--resume", "auto")
print(json.dumps(out))
"""


# By how much a loss may be off, of a fall by 3.2. Adam's first steps make much of small gradients, and 4 bits round
# those to nothing until what is left over has grown.
@pytest.mark.parametrize(
    ("compression", "tolerance"), [("int8", 0.01), pytest.param("int4", 0.3, marks=pytest.mark.slow)]
)
def test_training_follows_the_exact_reduction(
    compression, tolerance, tiny_hf, model_folder, rows_file, tmp_path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    # Wide enough that its weights are compressed.
    tiny_hf(
        vocab_size=260, hidden_size=64, intermediate_size=128, max_position_embeddings=256, eos_token_id=257,
        pad_token_id=257, bos_token_id=None,
    ).save_pretrained(model)  # fmt: skip
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-c", TRAINING, str(model), str(rows_file), str(tmp_path), f"none,{compression}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = {name: np.array(curve) for name, curve in json.loads(done.stdout.splitlines()[-1]).items()}
    exact, rounded = losses["none"], losses[compression]
    print(compression, "differs by", np.round(rounded - exact, 4).tolist(), "from", np.round(exact, 3).tolist())
    assert exact[0] - exact[-1] > 3
    assert rounded[0] == pytest.approx(exact[0], rel=1e-6)
    assert 0 < np.abs(rounded - exact).max() < tolerance
    if "resumed" in losses:
        # With its residuals.
        np.testing.assert_array_equal(losses["resumed"], rounded)


def test_a_compressed_run_goes_on_on_its_own_mesh_only() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = ModelConfig.from_hf({"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, **sizes})
    model, rows = CausalLM(config, rngs=nnx.Rngs(0)), SimpleNamespace(fingerprint="rows")
    for compression, words in (("none", []), ("int8", ["int8 on the mesh data=8,fsdp=1", "data=4,fsdp=2"])):
        settings = TrainConfig(model="m", data="d", output_dir="o", method="full", grad_compression=compression)
        then, now = (
            fingerprint(settings, model, None, rows, 8, shape)
            for shape in ({"data": 8, "fsdp": 1}, {"data": 4, "fsdp": 2})
        )
        lines = differences(then, now, without=("mesh",))
        assert len(lines) == len(words) // 2 and all(word in lines[0] for word in words)


def test_refused_where_there_is_nothing_to_gain(model_folder, rows_file, tmp_path) -> None:
    same = {"model": str(model_folder), "data": str(rows_file), "output_dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match="grad_compression=int8 with method=lora, whose gradients are those of small"):
        TrainConfig(**same, method="lora", grad_compression="int8").validate()
    with pytest.raises(UserError, match="grad_compression=int8: a plan does not count"):
        PlanConfig(**same, method="full", grad_compression="int8", gpu="H200").validate()
    config = TrainConfig(**same, method="full", dtype="float32", grad_compression="int8", max_seq_length=64)
    config.validate()
    with pytest.raises(UserError, match="grad_compression=int8 and a mesh with data=1"):
        run(config)

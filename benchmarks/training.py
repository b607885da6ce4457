"""One training step of a random-weight model: what `benchmarks.step` measures."""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks.gpu_timing import kernel_times
from benchmarks.random_model import random_model
from fastjax.models.config import ModelConfig
from fastjax.models.lora import LoraConfig, apply_lora, split_trainable
from fastjax.models.quant_config import QuantConfig
from fastjax.models.remat import AUTO, RematPlan, parse_plan
from fastjax.train.config import parse_mesh
from fastjax.train.host_embedding import take_table
from fastjax.train.loss import ROWS
from fastjax.train.mesh import (
    frozen_shardings,
    make_mesh,
    num_batch_shards,
    put_batch,
    replicated,
    state_shardings,
    trained_shardings,
)
from fastjax.train.optim import make_optimizer
from fastjax.train.plan.auto import auto_step
from fastjax.train.plan.collectives import collective_bytes
from fastjax.train.plan.memory import read_memory
from fastjax.train.step import make_train_step

LENGTHS = Path(__file__).parent / "lengths"
# What an H200 holds for seconds in bfloat16 matmuls.
FLOP_PER_SECOND = 687e12
# Kernels by what they are for; the first pattern that is found in a name decides.
_GROUPS = {
    "attention": "attention|fmha|flash|cudnn",
    "4-bit weights": "nf4|quant_matmul|weight_sum",
    "adapters": "lora",
    "loss": "cross_entropy",
    "norms": "rms_norm",
    "SwiGLU": "swiglu",
    "positions": "rope",
    "matmuls": "gemm|cutlass|nvjet|xmma|splitk",
    "copies between device and host": "memcpyd2h|memcpyh2d|dtoh|htod",
    "copies": "memcpy|dynamic.update.slice|dynamic.slice|copy|concatenate|transpose|memset",
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compile, warm up and time the step; every figure that the benchmark prints."""
    mesh = make_mesh(*parse_mesh(options.mesh))
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    changes["max_position_embeddings"] = max(options.seq, 8192)
    model = random_model(options.preset, QuantConfig() if options.method == "qlora" else None, **changes)
    apply_lora(model, LoraConfig(r=options.rank, lora_alpha=options.rank), jax.random.key(0))
    config = model.config
    graphdef, trainable, frozen = split_trainable(model, options.method)
    del model
    table = None
    if options.offload_embedding:
        frozen, table = take_table(frozen)
        table = np.array(table)
    optimizer = make_optimizer(optax.constant_schedule(1e-4), optim=options.optim)
    trainable = jax.device_put(trainable, trained_shardings(config, mesh, trainable))
    frozen = jax.device_put(frozen, frozen_shardings(config, mesh, frozen))
    places = state_shardings(config, mesh, jax.eval_shape(optimizer.init, trainable), trainable)
    opt_state = jax.jit(optimizer.init, out_shardings=places)(trainable)
    host_batch: dict[str, Any] = make_batch(options, config.vocab_size, num_batch_shards(mesh))
    if table is not None:
        host_batch[ROWS] = table[host_batch["input_ids"]]
        del table
    batch = put_batch(host_batch, mesh)
    rng = jax.device_put(jax.random.key(0), replicated(mesh))
    states = trainable, opt_state, frozen
    started = time.perf_counter()
    compiled, plan = compile_step(options, config, graphdef, optimizer, mesh, states, batch, rng)
    compile_s = time.perf_counter() - started
    memory = read_memory(compiled)
    num_tokens = int(np.sum(np.asarray(batch["segment_ids"]) > 0))
    losses: list[float] = []
    grad_norm = 0.0

    def run(count: int) -> None:
        nonlocal trainable, opt_state, grad_norm
        for _ in range(count):
            trainable, opt_state, metrics = compiled(trainable, opt_state, frozen, batch, rng)
        losses.append(float(metrics["loss_sum"]) / max(int(metrics["num_target_tokens"]), 1))
        grad_norm = float(metrics["grad_norm"])

    run(2)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        run(options.steps)
        times.append((time.perf_counter() - started) / options.steps)
    step_s = min(times)
    if options.profile:
        print_profile(kernel_times(lambda: run(1)))
    flop = useful_flop(config, batch)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "preset": options.preset,
        "method": options.method,
        "batch": options.batch,
        "seq": options.seq,
        "mesh": options.mesh,
        "packed": options.packed,
        "remat": plan,
        "offload_embedding": options.offload_embedding,
        "memory_budget_gib": options.memory_budget_gib,
        "tokens_per_second": round(num_tokens / step_s, 1),
        "tokens_per_second_per_device": round(num_tokens / step_s / mesh.size, 1),
        "exchanged_mib": {
            " ".join(kind): round(size / 2**20, 1) for kind, size in collective_bytes(compiled.as_text()).items()
        },
        "step_ms": round(step_s * 1e3, 2),
        "spread_ms": round((max(times) - min(times)) * 1e3, 2),
        "useful_tflops": round(flop / step_s / 1e12, 1),
        "share_of_687": round(flop / step_s / mesh.size / FLOP_PER_SECOND, 3),
        "peak_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 2),
        "compiled_gib": round(memory.peak / 2**30, 2),
        "host_gib": round(memory.host / 2**30, 2),
        "compile_s": round(compile_s, 1),
        "losses": [round(loss, 4) for loss in losses],
        "grad_norm": round(grad_norm, 6),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def compile_step(
    options: argparse.Namespace,
    config: ModelConfig,
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    states: tuple[Any, Any, Any],
    batch: dict[str, jax.Array],
    rng: jax.Array,
) -> tuple[Any, str]:
    """The compiled step and its plan: what --remat names, or as a run chooses it."""

    def make(plan: RematPlan) -> Any:
        return make_train_step(graphdef, optimizer, mesh=mesh, remat=plan)

    plan = None if options.remat == AUTO else parse_plan(options.remat)
    if plan is None:
        step = auto_step(
            make, states, batch, rng, config=config, itemsize=2, num_shards=num_batch_shards(mesh),
            budget_gib=options.memory_budget_gib, say=lambda text: print(text, file=sys.stderr, flush=True),
            search_anew=True,
        )  # fmt: skip
        if step.choice is not None:
            return step.choice.compiled, str(step.choice.plan)
        plan = parse_plan("none")
    return make(plan).lower(*states, batch, rng).compile(), str(plan)


def make_batch(options: argparse.Namespace, vocab_size: int, num_shards: int = 1) -> dict[str, np.ndarray]:
    """[1, B * num_shards, T] arrays of random ids: full rows, or rows packed first-fit from a list of lengths."""
    rng = np.random.default_rng(0)
    shape = (1, options.batch * num_shards, options.seq)
    ids = rng.integers(0, vocab_size, shape).astype(np.int32)
    segments = np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(options.seq, dtype=np.int32), shape).copy()
    if options.packed:
        lengths = np.array((LENGTHS / f"{options.packed}.txt").read_text().split(), np.int64)
        segments, positions = packed_rows(rng.permutation(lengths), shape[1], options.seq)
        segments, positions = segments[None], positions[None]
    batch = {"input_ids": ids, "loss_mask": segments > 0, "segment_ids": segments}
    return batch | ({"positions": positions} if options.packed else {})


def packed_rows(lengths: np.ndarray, num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """segment_ids and positions, int32 [num_rows, width]: documents first-fit, as many as there is room for."""
    segments, positions = np.zeros((num_rows, width), np.int32), np.zeros((num_rows, width), np.int32)
    filled, count = [0] * num_rows, [0] * num_rows
    for length in np.minimum(lengths, width):
        row = next((row for row in range(num_rows) if filled[row] + length <= width), None)
        if row is None:
            continue
        where = slice(filled[row], filled[row] + length)
        count[row] += 1
        segments[row, where], positions[row, where] = count[row], np.arange(length)
        filled[row] += length
        if min(width - f for f in filled) < lengths.min():
            break
    return segments, positions


def useful_flop(config: ModelConfig, batch: dict[str, jax.Array]) -> float:
    """FLOP of a step that recomputes nothing: forward and input gradient of the frozen matmuls, and attention."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = width * head * (2 * heads + 2 * kv_heads) + 3 * width * inner
    matmuls = config.num_hidden_layers * layer + width * config.vocab_size
    num_tokens = float(jnp.sum(batch["segment_ids"] > 0))
    # A token at position p of its document sees p + 1 keys.
    positions = batch.get("positions", jnp.arange(batch["input_ids"].shape[-1]))
    seen = float(jnp.sum(jnp.where(batch["segment_ids"] > 0, positions + 1, 0)))
    attention = config.num_hidden_layers * 4 * heads * head * seen
    return 4 * matmuls * num_tokens + 3.5 * attention


def print_profile(times: dict[str, list[float]]) -> None:
    """Kernel times by group, the longest first, and by name under each group, on stderr."""
    rows = sorted(((sum(values), len(values), name) for name, values in times.items()), reverse=True)
    groups: dict[str, list[tuple[float, int, str]]] = {}
    for row in rows:
        groups.setdefault(group_of(row[2]), []).append(row)
    for group, members in sorted(groups.items(), key=lambda item: -sum(row[0] for row in item[1])):
        print(f"{sum(row[0] for row in members) * 1e3:9.2f} ms  {group}", file=sys.stderr)
        for total, count, name in members[:8]:
            print(f"    {total * 1e3:9.2f} ms {count:6d} x  {name[:100]}", file=sys.stderr)
    print(f"{sum(row[0] for row in rows) * 1e3:9.2f} ms on the device", file=sys.stderr, flush=True)


def group_of(kernel: str) -> str:
    """What a kernel of this name is for: the first group whose pattern is found in it."""
    return next((group for group, pattern in _GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE)), "the rest")

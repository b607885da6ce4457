"""Times RMSNorm, SwiGLU, RoPE, the loss and the optimisers on this machine's GPU, kernel beside XLA's own fusion.

python -m benchmarks.elementwise

The floor is the bytes that have to move, once each, at the rate of a device copy. Inside a model XLA can fuse further
than here: it reads saved activations where they lie in the stack of all layers, which a kernel gets as a copy.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.gpu_timing import seconds_per_call
from fastjax.kernels.linear_cross_entropy import specs as loss_specs
from fastjax.kernels.linear_cross_entropy.chunked import Options, losses_and_gradient
from fastjax.kernels.rms_norm import rms_norm
from fastjax.kernels.rms_norm import specs as norm_specs
from fastjax.kernels.rms_norm.pallas_triton import add_rms_norm_backward_pallas
from fastjax.kernels.rms_norm.reference import rms_norm_reference
from fastjax.kernels.rope import rope, rope_joined
from fastjax.kernels.rope import specs as rope_specs
from fastjax.kernels.swiglu import specs as swiglu_specs
from fastjax.kernels.swiglu import swiglu, swiglu_joined
from fastjax.train.optim import make_optimizer

COPY_BYTES_PER_SECOND = 4.3e12
# bfloat16, for a moment.
FLOP_PER_SECOND = 810e12
KERNEL, XLA = "pallas_triton", "reference"
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One row of the table: functions of the same arguments, by column, and the bytes that have to move."""

    name: str
    functions: dict[str, Callable]
    arguments: tuple[Any, ...]
    num_bytes: int


def both(function: Callable) -> dict[str, Callable]:
    return {name: partial(function, implementation=name) for name in (KERNEL, XLA)}


def backward(function: Callable, num_inputs: int) -> Callable:
    """(inputs..., cotangents...) -> gradients of the inputs."""

    def run(*arguments, implementation):
        inputs, cotangents = arguments[:num_inputs], arguments[num_inputs:]
        _, vjp = jax.vjp(lambda *inputs: function(*inputs, implementation=implementation), *inputs)
        return vjp(cotangents if len(cotangents) > 1 else cotangents[0])

    return run


def norm_backward(total, weight, dtotal, dy, *, implementation):
    if implementation == KERNEL:
        return add_rms_norm_backward_pallas(total, weight, dtotal, dy, EPS, False)
    return jax.vjp(lambda total: rms_norm_reference(total, weight, EPS), total)[1](dy)[0] + dtotal


def elementwise_cases() -> list[Case]:
    x, _, weight, _, _ = norm_specs.abstract_arguments(norm_specs.SHAPES["Llama-3-8B"])
    gate, up, dinner = swiglu_specs.abstract_arguments(swiglu_specs.SHAPES["Llama-3-8B"])
    query, key, cos, sin, _, _ = rope_specs.abstract_arguments(rope_specs.SHAPES["Llama-3-8B"])
    turn = 2 * (query.size + key.size) * 2 + (cos.size + sin.size) * 4

    def norm(x, residual, weight, *, implementation):
        return rms_norm(x, weight, eps=EPS, residual=residual, implementation=implementation)

    def turned_back(cos, sin, dquery, dkey, *, implementation):
        return backward(lambda q, k, **how: rope(q, k, cos, sin, **how), 2)(
            jnp.zeros_like(dquery), jnp.zeros_like(dkey), dquery, dkey, implementation=implementation
        )

    heads: dict[str, Any] = {"num_heads": query.shape[2], "num_kv_heads": key.shape[2]}
    turn_joined = partial(rope_joined, **heads)
    joined_turn = turn + 2 * key.size * 2
    joined = rope_specs.joined_arguments(rope_specs.SHAPES["Llama-3-8B"])[0]
    gate_up = jax.ShapeDtypeStruct((gate.shape[0], 2 * gate.shape[1]), gate.dtype)

    def joined_back(cos, sin, *cotangents, implementation):
        turned = lambda x, **how: turn_joined(x, cos, sin, **how)  # noqa: E731
        return backward(turned, 1)(jnp.zeros(joined.shape, joined.dtype), *cotangents, implementation=implementation)

    return [
        Case("RMSNorm with residual", both(norm), (x, x, weight), 4 * x.size * 2),
        Case("RMSNorm with residual, backward", both(norm_backward), (x, weight, x, x), 4 * x.size * 2),
        Case("SwiGLU", both(swiglu), (gate, up), 3 * gate.size * 2),
        Case("SwiGLU, backward", both(backward(swiglu, 2)), (gate, up, dinner), 5 * gate.size * 2),
        Case("SwiGLU of joined gate and up", both(swiglu_joined), (gate_up,), 3 * gate.size * 2),
        Case("the same, backward", both(backward(swiglu_joined, 1)), (gate_up, dinner), 5 * gate.size * 2),
        Case("RoPE on q and k", both(rope), (query, key, cos, sin), turn),
        Case("RoPE on q and k, backward", both(turned_back), (cos, sin, query, key), turn),
        Case("RoPE on joined q, k and v", both(turn_joined), (joined, cos, sin), joined_turn),
        Case("the same, backward", both(joined_back), (cos, sin, query, key, key), joined_turn),
    ]


def loss_cases() -> list[Case]:
    num_tokens, width, vocab = loss_specs.SHAPES["Llama-3-8B"]
    arguments = loss_specs.abstract_arguments((num_tokens, width, vocab))
    rows = 2048
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    targets, weights = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32))

    def from_logits(logits, targets, weights, *, implementation):
        options = Options(False, None, 0.0, rows, implementation, False)
        return losses_and_gradient(logits, targets, weights, jnp.dtype(jnp.bfloat16), options)

    names = {KERNEL: KERNEL, XLA: "xla"}
    found = [
        Case(
            "logits of 2048 tokens to loss and gradient",
            {column: partial(from_logits, implementation=name) for column, name in names.items()},
            (logits, targets, weights),
            rows * vocab * 6,
        )
    ]
    for chunk in (512, 1024, 2048, 4096):
        functions = {column: loss_specs.loss_and_gradient(name, chunk_size=chunk) for column, name in names.items()}
        # Two matmuls are the floor. Half of the random weights are below 0, and their tokens cost nothing.
        floor_bytes = int(4 * num_tokens / 2 * width * vocab / FLOP_PER_SECOND * COPY_BYTES_PER_SECOND)
        name = f"head and loss, 8192 tokens, half of them targets, chunks of {chunk}"
        found.append(Case(name, functions, arguments, floor_bytes))
    return found


def optimizer_cases() -> list[Case]:
    leaf = jax.ShapeDtypeStruct((32, 14336, 16), jnp.float32)
    found = []
    for optim, state_bytes in (("adamw", 8), ("adamw_bf16", 4), ("adamw_8bit", 2)):
        optimizer = make_optimizer(lambda step: 1e-4, optim=optim, weight_decay=0.01, max_grad_norm=None)

        def step(params, gradients, optimizer=optimizer):
            # The state is made here, so that the zeros it starts from are compiled in and not read.
            state = jax.lax.optimization_barrier(optimizer.init(params))
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        tree = {"layers": {"lora_b": leaf}}
        moved = leaf.size * (4 + 4 + 4 + 3 * state_bytes)
        found.append(Case(f"{optim}, 7.3 million parameters, its state made too", {XLA: step}, (tree, tree), moved))
    return found


def concrete(arguments: tuple, seed: int) -> tuple:
    """Random numbers in the places of abstract arguments; targets are token ids."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def draw(spec):
        if spec.dtype == jnp.int32:
            return jax.random.randint(next(keys), spec.shape, 0, 128256)
        return jax.random.normal(next(keys), spec.shape, spec.dtype)

    return jax.tree.map(draw, arguments)


def difference(function: Callable, other: Callable, arguments: tuple) -> float:
    """Largest distance between two results, over the largest magnitude of the leaf."""
    pairs = zip(jax.tree.leaves(function(*arguments)), jax.tree.leaves(other(*arguments)), strict=True)
    return max(
        float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b.astype(jnp.float32)))) for a, b in pairs
    )


def main() -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    cases = [*elementwise_cases(), *loss_cases(), *optimizer_cases()]
    jobs = [(case, column) for case in cases for column in case.functions]
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda job: jax.jit(job[0].functions[job[1]]).lower(*job[0].arguments).compile(), jobs)
        programs = dict(zip([(case.name, column) for case, column in jobs], compiled, strict=True))
    print("| op | kernel us | XLA us | floor us | difference |\n|---|---|---|---|---|")
    for case in cases:
        inputs = [concrete(case.arguments, seed) for seed in range(2)]
        times_s = {c: seconds_per_call(programs[case.name, c], inputs) for c in case.functions}
        off = np.nan
        if KERNEL in times_s:
            off = difference(programs[case.name, KERNEL], programs[case.name, XLA], inputs[0])
        kernel, xla = (f"{times_s[c] * 1e6:.1f}" if c in times_s else "" for c in (KERNEL, XLA))
        floor = case.num_bytes / COPY_BYTES_PER_SECOND * 1e6
        print(f"| {case.name} | {kernel} | {xla} | {floor:.1f} | {off:.1e} |", flush=True)


if __name__ == "__main__":
    main()

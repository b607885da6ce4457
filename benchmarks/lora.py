"""Times a layer's projections with adapters over 4-bit weights beside the frozen layer, as a Markdown table.

python -m benchmarks.lora
"""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_timing import seconds_per_call
from fastjax.kernels.lora import lora_matmul
from fastjax.kernels.lora.specs import LLAMA_3_8B, abstract_arguments
from fastjax.kernels.nf4 import quantize
from fastjax.kernels.nf4.pallas_triton import dequantize_joined
from fastjax.kernels.quant_matmul.reference import product

RANK = 16
NUM_ROWS = 8192


def frozen(x, weights, lora_a, lora_b, douts):
    """The layer without adapters: joined weights, split outputs and joined gradients; forward and input gradient."""
    del lora_a, lora_b
    ends = np.cumsum([weight.shape[0] for weight in weights])[:-1]
    y = jnp.split(product(x, dequantize_joined(weights, x.dtype)), ends, axis=1)
    matrix = dequantize_joined(jax.lax.optimization_barrier(weights), x.dtype)
    return y, product(jnp.concatenate(douts, axis=1), matrix, transposed=False)


def adapted(x, weights, lora_a, lora_b, douts, implementation: str = "joined"):
    """The same with adapters and their gradients. The barriers let forward and backward share nothing but what is kept
    for the backward, as in a layer scan, where they lie in two loops."""
    scales = (1.0,) * len(weights)
    outputs, backward = jax.vjp(
        lambda x, a, b: lora_matmul(x, weights, a, b, scales, implementation=implementation), x, lora_a, lora_b
    )
    return outputs, jax.lax.optimization_barrier(backward)(douts)


def arguments(group: tuple[int, tuple[int, ...]], num_rows: int, rank: int) -> tuple:
    """Random arrays in the places of `abstract_arguments`."""
    x, weights, lora_a, lora_b, douts = abstract_arguments(group, num_rows, rank)
    keys = iter(jax.random.split(jax.random.key(0), 64))
    weights = tuple(quantize(jax.random.normal(next(keys), w.shape, jnp.bfloat16) * 0.02) for w in weights)
    arrays = jax.tree.map(
        lambda spec: jax.random.normal(next(keys), spec.shape, spec.dtype) * 0.02, (x, lora_a, lora_b, douts)
    )
    x, lora_a, lora_b, douts = arrays
    return x, weights, lora_a, lora_b, douts


def median_times_s(functions: list, inputs: list[tuple], rounds: int = 7) -> list[float]:
    """Device seconds of one call of each, by turns: the GPU's clock falls with its load, so that order would count."""
    times = [[seconds_per_call(function, inputs, repeats=2) for function in functions] for _ in range(rounds)]
    return list(np.median(times, axis=0))


def main() -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    print(f"Forward and backward of {NUM_ROWS} rows, r = {RANK}, us\n")
    print("| projections | frozen | with adapters | over frozen |\n|---|---|---|---|")
    functions = (frozen, adapted)
    groups = [arguments(group, NUM_ROWS, RANK) for group in LLAMA_3_8B.values()]
    jobs = [(function, group) for group in groups for function in functions]
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda job: jax.jit(job[0]).lower(*job[1]).compile(), jobs))
    times_s = [median_times_s(compiled[2 * i : 2 * i + 2], [group]) for i, group in enumerate(groups)]
    table = np.array(times_s) * 1e6
    for name, (base, time) in zip([*LLAMA_3_8B, "all seven"], [*table, table.sum(axis=0)], strict=True):
        print(f"| {name} | {base:.0f} | {time:.0f} | {time / base - 1:.1%} |")


if __name__ == "__main__":
    main()

"""Times a layer's projections with adapters over 4-bit weights beside the frozen layer, as a Markdown table.

python -m benchmarks.lora
"""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_timing import seconds_per_call
from fastjax.kernels.lora.specs import LLAMA_3_8B, abstract_arguments, forward_and_gradients
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


def apart(x, weights, lora_a, lora_b, douts):
    """Forward and backward with nothing in common, as in a layer scan, where they lie in two loops."""
    function = forward_and_gradients("joined")
    outputs, _ = function(x, weights, lora_a, lora_b, douts)
    arguments = jax.lax.optimization_barrier((x, weights, lora_a, lora_b, douts))
    return outputs, function(*arguments)[1]


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


def main() -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    print(f"Forward and backward of {NUM_ROWS} rows, r = {RANK}, us\n")
    print("| projections | frozen | with adapters | over frozen | forward and backward apart | over frozen |")
    print("|---|---|---|---|---|---|")
    functions = (frozen, forward_and_gradients("joined"), apart)
    jobs = [(f, arguments(group, NUM_ROWS, RANK)) for group in LLAMA_3_8B.values() for f in functions]
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda job: jax.jit(job[0]).lower(*job[1]).compile(), jobs))
    times_s = [seconds_per_call(f, [job[1]], repeats=5) for f, job in zip(compiled, jobs, strict=True)]
    table = np.array(times_s).reshape(-1, len(functions)) * 1e6
    for name, (base, one, two) in zip([*LLAMA_3_8B, "all seven"], [*table, table.sum(axis=0)], strict=True):
        print(f"| {name} | {base:.0f} | {one:.0f} | {one / base - 1:.1%} | {two:.0f} | {two / base - 1:.1%} |")


if __name__ == "__main__":
    main()

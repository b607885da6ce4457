"""Times products with a 4-bit weight on this machine's GPU, as a Markdown table.

python -m benchmarks.quant_matmul
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.gpu_timing import seconds_per_call
from fastjax.kernels.nf4 import dequantize, quantize
from fastjax.kernels.nf4.specs import SHAPES
from fastjax.kernels.quant_matmul import quant_matmul
from fastjax.kernels.quant_matmul.reference import product
from fastjax.kernels.quant_matmul.specs import NUM_ROWS

# What an H200 holds: a device copy, read plus write, and a bfloat16 matmul for seconds.
COPY_BYTES_PER_SECOND = 4.3e12
FLOP_PER_SECOND = 687e12
# 10 x 30 MB: more than the L2 cache holds, so that every call reads device memory.
NUM_WEIGHTS = 10


def compiled(functions: list) -> list:
    """(function, arguments) -> compiled, side by side: most of the time goes to the compiler."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda f: jax.jit(f[0]).lower(*f[1]).compile(), functions))


def products() -> None:
    columns = ("fused us", "% of copy", "dequantise + matmul us", "XLA's dequantise us", "bf16 matmul us", "floor us")
    print("| weight | rows | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 2))
    for name in ("Llama-3-8B gate_proj", "Llama-3-8B down_proj"):
        shape = SHAPES[name]
        keys = jax.random.split(jax.random.key(0), NUM_WEIGHTS)
        packed = [quantize(jax.random.normal(key, shape, jnp.bfloat16) * 0.02) for key in keys]
        dense = [dequantize(weight) for weight in packed[:4]]
        xs = {rows: jax.random.normal(jax.random.key(rows), (rows, shape[1]), jnp.bfloat16) for rows in NUM_ROWS}
        jobs = []
        for x in xs.values():
            for implementation in ("pallas_triton", "dequantize", "reference"):
                jobs.append((partial(quant_matmul, implementation=implementation), (x, packed[0])))
            jobs.append((product, (x, dense[0])))
        functions = iter(compiled(jobs))
        for rows, x in xs.items():
            times = []
            for weights in (packed, packed, packed[:4], dense):
                times.append(seconds_per_call(next(functions), [(x, weight) for weight in weights], repeats=2))
            num_bytes = packed[0].nbytes + 2 * rows * sum(shape)
            floor = max(num_bytes / COPY_BYTES_PER_SECOND, 2 * rows * shape[0] * shape[1] / FLOP_PER_SECOND)
            share = packed[0].nbytes / times[0] / COPY_BYTES_PER_SECOND
            cells = " | ".join(f"{time_s * 1e6:.1f}" for time_s in times[1:])
            print(f"| {name} {shape} | {rows} | {times[0] * 1e6:.1f} | {share:.0%} | {cells} | {floor * 1e6:.1f} |")


def main() -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    products()


if __name__ == "__main__":
    main()

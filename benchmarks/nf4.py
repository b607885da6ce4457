"""Times 4-bit quantisation and dequantisation on this machine's GPU, as a Markdown table.

python -m benchmarks.nf4
"""

import jax
import jax.numpy as jnp

from benchmarks.gpu_timing import seconds_per_call
from fastjax.kernels.nf4 import dequantize, quantize
from fastjax.kernels.nf4.specs import SHAPES

# Read plus write of a device copy, measured on an H200: the floor of anything that moves so many bytes.
COPY_BYTES_PER_SECOND = 4.3e12
NUM_WEIGHTS = 8


def main() -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    print("| weight | op | time us | moved TB/s | floor us |\n|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        if not name.startswith("Llama"):
            continue
        keys = jax.random.split(jax.random.key(0), NUM_WEIGHTS)
        dense = [(jax.random.normal(key, shape, jnp.bfloat16) * 0.02,) for key in keys]
        packed = [(quantize(weight),) for (weight,) in dense]
        moved = packed[0][0].nbytes + 2 * shape[0] * shape[1]
        for op, function, inputs in (
            ("dequantize, kernel", lambda w: dequantize(w, implementation="pallas_triton"), packed),
            ("dequantize, XLA", lambda w: dequantize(w, implementation="reference"), packed),
            ("quantize", lambda w: quantize(w, implementation="pallas_triton"), dense),
        ):
            time_s = seconds_per_call(jax.jit(function), inputs)
            floor = moved / COPY_BYTES_PER_SECOND
            print(f"| {name} {shape} | {op} | {time_s * 1e6:.1f} | {moved / time_s / 1e12:.2f} | {floor * 1e6:.1f} |")


if __name__ == "__main__":
    main()

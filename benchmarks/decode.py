"""Times greedy decoding of a random-weight model on this machine's GPU.

python -m benchmarks.decode --preset llama3-8b --method qlora --batch 1 16 --prompt 512 --new 128
"""

import argparse
import json
import time

import jax
import numpy as np

from benchmarks.gpu_timing import kernel_times
from benchmarks.random_model import random_model
from fastjax.models.generation import generate
from fastjax.models.quant_config import QuantConfig


def seconds(model, batch: int, prompt: int, new: int) -> float:
    """Of one call, compiled beforehand: the prompts are read, and `new` tokens follow each."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, (batch, prompt)).tolist()
    generate(model, prompts, max_new_tokens=new)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        generate(model, prompts, max_new_tokens=new)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--method", choices=("qlora", "lora"), default="qlora")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    model = random_model(options.preset, QuantConfig() if options.method == "qlora" else None)
    print("| batch | prompt s | tokens/s while decoding | tokens/s, prompt included |\n|---|---|---|---|")
    for batch in options.batch:
        # Another length has another compilation, of the same kernels.
        one, all_new = (seconds(model, batch, options.prompt, new) for new in (1, options.new))
        decoding = batch * (options.new - 1) / (all_new - one)
        print(f"| {batch} | {one:.4f} | {decoding:.1f} | {batch * options.new / all_new:.1f} |", flush=True)
        if options.profile:
            prompts = np.zeros((batch, options.prompt), np.int64).tolist()
            times = kernel_times(lambda prompts=prompts: generate(model, prompts, max_new_tokens=options.new) and 0)
            rows = sorted(((sum(v), len(v), k) for k, v in times.items()), reverse=True)
            for total, count, name in rows[:30]:
                print(f"    {total * 1e3:9.2f} ms {count:7d} x  {name[:90]}")
            print(f"    {sum(row[0] for row in rows) * 1e3:9.2f} ms on the device", flush=True)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30
    print(json.dumps({"peak_gib": round(peak, 2), "device": jax.devices()[0].device_kind, "jax": jax.__version__}))


if __name__ == "__main__":
    main()

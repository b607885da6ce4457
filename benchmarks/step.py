"""Times whole training steps of a random-weight model on this machine's GPU.

python -m benchmarks.step --preset llama3-8b --batch 4 --seq 2048 --method qlora
for mesh in data=1 data=2 fsdp=2; do python -m benchmarks.step --mesh $mesh; done

Needs jax, flax, optax and numpy only. With --memory-budget-gib the allocator gets no more than that. --remat auto finds
its plan as a run does, without those that earlier runs remember. stdout has one JSON line.
"""

import argparse
import json
import os

from fastjax.devices import has_nvidia_device


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--method", choices=("qlora", "lora"), default="qlora")
    parser.add_argument("--batch", type=int, default=4, help="rows of each data-parallel device")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--remat", default="auto")
    parser.add_argument("--offload-embedding", action="store_true", help="keep the embedding's table in host memory")
    parser.add_argument("--optim", default="adamw")
    parser.add_argument(
        "--memory-budget-gib", type=float, help="limit of the allocator, weights included, which --remat auto fills"
    )
    parser.add_argument(
        "--mesh", default="data=1", help="devices by axis, as training takes it: data=2, fsdp=2, tensor=2"
    )
    parser.add_argument("--packed", help="name of a list of lengths in benchmarks/lengths: rows are packed from it")
    parser.add_argument("--layers", type=int, help="this many layers instead of the preset's, to find a fault fast")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print kernel times by group and name on stderr")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.memory_budget_gib is not None and has_nvidia_device():
        # Before jax looks for the GPU: the allocator takes this share of its memory at the start, and no more.
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(options.memory_budget_gib / total_memory_gib())
    from benchmarks.training import measure

    result = measure(options)
    print(json.dumps(result), flush=True)


def total_memory_gib() -> float:
    """Of the first GPU, as its driver tells."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]) / 1024


if __name__ == "__main__":
    main()

"""Times attention on this machine's GPU, beside cuDNN in the same run, as Markdown tables.

python -m benchmarks.attention            the table
python -m benchmarks.attention --tune     finds the fastest tiles first, and writes them to kernels/attention/tuned.py
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_tiles import tune
from benchmarks.gpu_timing import seconds_per_call
from fastjax.kernels.attention import attention, make_tile_bounds

COPY_BYTES_PER_SECOND = 4.3e12
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = Path(__file__).parent / "lengths/alpaca.txt"
ROW = 8192
# Layers of the cache that decoding calls rotate through, so that none is in the L2 cache.
MAX_CACHE_BYTES = 5 * 2**30


@dataclass(frozen=True)
class Case:
    """One row of the table: a batch of rows of these documents, or of one sequence."""

    name: str
    batch: int
    length: int
    window: int | None = None
    documents: tuple[int, ...] | None = None

    @property
    def pairs(self) -> int:
        """(query, key) pairs that are seen."""
        window = self.window or self.length
        count = sum(sum(min(i + 1, window) for i in range(n)) for n in self.documents or (self.length,))
        return self.batch * count

    def flop(self, passes: float) -> float:
        return 4 * self.pairs * NUM_HEADS * HEAD_DIM * passes


def alpaca_row() -> tuple[int, ...]:
    """The first rows of the data set that fit into one packed row."""
    lengths = np.array(LENGTHS.read_text().split(), int)
    return tuple(lengths[: np.searchsorted(np.cumsum(lengths), ROW, side="right")].tolist())


CASES = (
    Case("dense, B4 T2048", 4, 2048),
    Case("dense, B1 T8192", 1, 8192),
    Case("dense, B1 T16384", 1, 16384),
    Case("dense, B1 T32768", 1, 32768),
    Case("window 4096, T32768", 1, 32768, window=4096),
    Case("packed, 8 x 1024", 1, ROW, documents=(1024,) * 8),
    Case("packed, 64 x 128", 1, ROW, documents=(128,) * 64),
    Case("packed, Alpaca", 1, ROW, documents=alpaca_row()),
)


def arrays(case: Case) -> tuple[jax.Array, ...]:
    """query, key, value, dout."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    return tuple(
        jax.random.normal(key, (case.batch, case.length, n, HEAD_DIM), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )


def masks(case: Case) -> dict[str, jax.Array]:
    if case.documents is None:
        return {}
    ids = np.zeros((case.batch, case.length), np.int32)
    ids[:, : sum(case.documents)] = np.repeat(np.arange(len(case.documents)) + 1, case.documents)
    return {"segment_ids": jnp.asarray(ids), "tile_bounds": make_tile_bounds(jnp.asarray(ids))}


def forward(query, key, value, dout, masks, **settings) -> jax.Array:
    del dout
    return attention(query, key, value, **masks, **settings)


def forward_and_backward(query, key, value, dout, masks, **settings) -> Any:
    out, vjp = jax.vjp(lambda *x: attention(*x, **masks, **settings), query, key, value)
    return out, vjp(dout)


def compiled(jobs: list[tuple[Callable, tuple]]) -> list:
    """Compiled side by side; None where that is refused."""

    def compile_one(job):
        try:
            return jax.jit(job[0]).lower(*job[1]).compile()
        except Exception as error:
            print(f"refused: {str(error)[:120]}", flush=True)
            return None

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(compile_one, jobs))


def training() -> None:
    """Each case by our kernels, by cuDNN with the same mask, and by cuDNN without segments or window."""
    columns = ("forward us", "TFLOP/s", "of cuDNN", "fwd + bwd us", "TFLOP/s", "of cuDNN", "of dense cuDNN", "MiB")
    print("| case | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1), flush=True)
    jobs = []
    for case in CASES:
        inputs = (*arrays(case), masks(case))
        ours = {"implementation": "pallas_triton", "window": case.window}
        same = {"implementation": "cudnn", "window": case.window}
        if case.documents is not None:
            same["max_segments"] = len(case.documents) + 1
        without_masks = (*inputs[:4], {})
        for function in (forward, forward_and_backward):
            jobs.append((partial(function, **ours), inputs))
            jobs.append((partial(function, **same), inputs))
            jobs.append((partial(function, implementation="cudnn"), without_masks))
    functions = compiled(jobs)
    times = [None if f is None else seconds_per_call(f, [job[1]]) for f, job in zip(functions, jobs, strict=True)]
    for i, case in enumerate(CASES):
        cells = []
        for j, passes in ((0, 1.0), (3, 3.5)):
            ours, same, dense = times[6 * i + j : 6 * i + j + 3]
            ratio = "-" if same is None else f"{same / ours:.2f}"
            cells += [f"{ours * 1e6:.0f}", f"{case.flop(passes) / ours / 1e12:.0f}", ratio]
        cells.append(f"{dense / ours:.2f}")
        cells.append(f"{functions[6 * i + 3].memory_analysis().temp_size_in_bytes / 2**20:.0f}")
        print(f"| {case.name} | " + " | ".join(cells) + " |", flush=True)


def dense_on_hopper() -> None:
    """Dense rows by the Mosaic GPU forward, whose backward is cuDNN's, beside cuDNN."""
    cases = [case for case in CASES if case.documents is None and case.window is None]
    jobs = []
    for case in cases:
        for function in (forward, forward_and_backward):
            for name in ("mosaic_gpu", "cudnn"):
                jobs.append((partial(function, implementation=name), (*arrays(case), {})))
    functions = compiled(jobs)
    if functions[0] is None:
        return
    columns = ("forward us", "TFLOP/s", "of cuDNN", "fwd + bwd us", "TFLOP/s", "of cuDNN")
    print("\n| mosaic_gpu | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1), flush=True)
    times = [seconds_per_call(f, [job[1]]) for f, job in zip(functions, jobs, strict=True)]
    for i, case in enumerate(cases):
        cells = []
        for j, passes in ((0, 1.0), (2, 3.5)):
            ours, cudnn = times[4 * i + j : 4 * i + j + 2]
            cells += [f"{ours * 1e6:.0f}", f"{case.flop(passes) / ours / 1e12:.0f}", f"{cudnn / ours:.2f}"]
        print(f"| {case.name} | " + " | ".join(cells) + " |", flush=True)


def decode_step(query, key, value, positions, layer) -> jax.Array:
    return attention(query, key, value, positions=positions, layer=layer, implementation="pallas_triton")


def decoding() -> None:
    """One query a row against a full cache."""
    print("\n| decode | us | GB of cache | of copy bandwidth |\n|---|---|---|---|", flush=True)
    jobs, sizes = [], []
    for length in (512, 4096, 32768):
        for batch in (1, 16):
            shape = (batch, length, NUM_KV_HEADS, HEAD_DIM)
            num_bytes = 4 * int(np.prod(shape))
            num_layers = int(max(1, min(64, MAX_CACHE_BYTES // num_bytes)))
            key, value = (jax.random.normal(jax.random.key(i), (num_layers, *shape), jnp.bfloat16) for i in range(2))
            query = jax.random.normal(jax.random.key(2), (batch, 1, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
            positions = jnp.full((batch, 1), length - 1, jnp.int32)
            jobs.append((decode_step, [(query, key, value, positions, jnp.int32(i)) for i in range(num_layers)]))
            sizes.append((length, batch, num_bytes))
    functions = compiled([(f, inputs[0]) for f, inputs in jobs])
    for function, (_, inputs), (length, batch, num_bytes) in zip(functions, jobs, sizes, strict=True):
        time_s = seconds_per_call(function, inputs)
        share = num_bytes / time_s / COPY_BYTES_PER_SECOND
        print(f"| S {length}, batch {batch} | {time_s * 1e6:.1f} | {num_bytes / 1e9:.3f} | {share:.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="find the tiles first")
    if parser.parse_args().tune:
        tune()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, bfloat16, {NUM_HEADS}/{NUM_KV_HEADS} heads of 128\n")
    training()
    dense_on_hopper()
    decoding()


if __name__ == "__main__":
    main()

"""Finds the tiles of the attention kernels on this machine's GPU, and writes them where the kernels read them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fastjax.kernels.attention
from benchmarks.gpu_timing import kernel_times
from fastjax.kernels.attention.blocks import DIRECTIONS, Tiles
from fastjax.kernels.attention.options import Options
from fastjax.kernels.attention.pallas_triton_backward import delta_pallas
from fastjax.kernels.attention.pallas_triton_dkey_dvalue import dkey_dvalue_pallas
from fastjax.kernels.attention.pallas_triton_dquery import dquery_pallas
from fastjax.kernels.attention.pallas_triton_forward import forward_pallas
from fastjax.kernels.attention.tuned import TUNED

TABLE = Path(fastjax.kernels.attention.__file__).parent / "tuned.py"
NUM_HEADS, NUM_KV_HEADS = 32, 8
REPEATS = 3
EVERYTHING_MIB = 4096
# rows, keys, num_warps, num_stages
CANDIDATES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "forward": (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 32, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2),
        (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 3), (128, 32, 8, 3),
    ),
    "dkey_dvalue": (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 64, 4, 3), (32, 64, 8, 2),
        (64, 64, 8, 2), (32, 32, 4, 2), (16, 64, 4, 2),
    ),
    "dquery": (
        (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3),
        (128, 128, 8, 2), (32, 32, 4, 2), (128, 32, 8, 2),
    ),
}  # fmt: skip
KERNELS = {"forward": "attention_forward", "dkey_dvalue": "attention_dkey_dvalue", "dquery": "attention_dquery"}


def tune(heads: tuple[int, ...] = (64, 128, 256), length: int = 8192) -> None:
    """Times every candidate, causal, bfloat16, and how many heads run side by side for the best; writes the table."""
    capability = jax.devices()[0].compute_capability
    found = dict(TUNED)
    for head_dim in heads:
        keys = jax.random.split(jax.random.key(0), 4)
        counts = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
        query, key, value, dout = (
            jax.random.normal(k, (1, length, n, head_dim), jnp.bfloat16) for k, n in zip(keys, counts, strict=True)
        )
        options = Options(scale=head_dim**-0.5)
        out, lse = jax.jit(lambda *x: forward_pallas(*x, {}, options, Tiles(64, 32, 4, 2)))(  # noqa: B023
            query, key[None], value[None]
        )
        delta = jax.jit(lambda *x: delta_pallas(*x, None))(out, dout)
        operands = {
            "forward": (forward_pallas, (query, key[None], value[None])),
            "dkey_dvalue": (dkey_dvalue_pallas, (query, key, value, dout, lse, delta)),
            "dquery": (dquery_pallas, (query, key, value, dout, lse, delta)),
        }
        for direction in DIRECTIONS:
            run, inputs = operands[direction]
            first = [Tiles(*tiles) for tiles in CANDIDATES[direction]]
            times = _times(run, inputs, options, direction, first)
            best = sorted(times, key=times.__getitem__)[:3]
            more = [replace(tiles, shared_mib=mib) for tiles in best for mib in (48, EVERYTHING_MIB)]
            if direction == "forward":
                more += [replace(tiles, query_in_registers=True) for tiles in (*best, *more)]
            times |= _times(run, inputs, options, direction, more)
            order = sorted(times, key=times.__getitem__)
            for tiles in order[:8]:
                print(f"{direction} H{head_dim} {times[tiles] * 1e6:8.0f} us {astuple(tiles)}", flush=True)
            found[capability, direction, head_dim, 2] = astuple(order[0])
            TUNED[capability, direction, head_dim, 2] = astuple(order[0])
    _write(found)


def _times(run: Callable, inputs: tuple, options: Options, direction: str, candidates: list[Tiles]) -> dict:
    """Median seconds by tiles; those that do not compile are named and left out."""

    def compiled(tiles: Tiles):
        try:
            return jax.jit(lambda *x: run(*x, {}, options, tiles)).lower(*inputs).compile()
        except Exception as error:
            print(f"left out: {direction} {astuple(tiles)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return None

    with ThreadPoolExecutor(16) as pool:
        functions = {t: f for t, f in zip(candidates, pool.map(compiled, candidates), strict=True) if f is not None}
    jax.block_until_ready([f(*inputs) for f in functions.values()][-1])
    seconds = kernel_times(lambda: [f(*inputs) for f in functions.values() for _ in range(REPEATS)][-1])
    launches = seconds[KERNELS[direction]]
    assert len(launches) == REPEATS * len(functions)
    return {t: float(np.median(launches[REPEATS * i : REPEATS * (i + 1)])) for i, t in enumerate(functions)}


def _write(found: dict) -> None:
    text = TABLE.read_text()
    head = text[: text.index("{\n")]
    rows = "".join(f'    ("{c}", "{d}", {h}, {b}): {tiles},\n' for (c, d, h, b), tiles in sorted(found.items()))
    TABLE.write_text(f"{head}{{\n{rows}}}\n")
    print(TABLE.read_text(), flush=True)

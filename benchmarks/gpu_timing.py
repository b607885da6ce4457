"""Kernel times on an NVIDIA GPU, read from jax's profiler: launch gaps and the host do not count."""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax


def kernel_times(run: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of every device kernel that `run` launches, by kernel name, in order of launch.

    Args:
      run: launches the work and returns arrays; its compilation and warm-up should lie behind.
    Raises: RuntimeError where the profiler saw no device.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        file = next(Path(folder).rglob("*.xplane.pb"))
        profile = jax.profiler.ProfileData.from_file(str(file))
    times: dict[str, list[float]] = defaultdict(list)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    times[event.name].append(event.duration_ns * 1e-9)
    if not times:
        raise RuntimeError("the profiler recorded no kernel; this needs an NVIDIA GPU")
    return times


def seconds_per_call(function: Callable, inputs: list[tuple], repeats: int = 3) -> float:
    """Device seconds of one call, averaged over calls that rotate through `inputs`, after a warm-up round.

    Rotating through more bytes than the L2 cache holds (60 MB on an H200) makes every call read device memory.
    """
    jax.block_until_ready([function(*args) for args in inputs[:2]])
    times = kernel_times(lambda: [function(*args) for _ in range(repeats) for args in inputs][-1])
    return sum(sum(each) for each in times.values()) / (repeats * len(inputs))

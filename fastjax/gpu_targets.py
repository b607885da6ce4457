"""GPUs that need not be there: descriptions from which jax compiles ahead of time and reports memory.

Needs the two wheels jax-cuda13-plugin and jax-cuda13-pjrt of jax's own version, and nothing else of NVIDIA's.
Figures are those of XLA's target_config specs and of NVIDIA's data sheets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class GpuTarget:
    """One GPU model.

    Attributes:
      name: as the driver (and Pallas' table of GPUs) spells it.
      compute_capability: (major, minor).
      core_count: streaming multiprocessors.
      shared_memory_per_block: opt-in limit of one block, in bytes.
      shared_memory_per_core: of one multiprocessor, in bytes.
      device_memory: in bytes.
      memory_bandwidth: in bytes a second.
      l2_cache: in bytes.
      clock_rate_ghz: boost clock.
      bf16_flops: dense bfloat16 matmuls with float32 sums, FLOP a second, as its maker states them.
    """

    name: str
    compute_capability: tuple[int, int]
    core_count: int
    shared_memory_per_block: int
    shared_memory_per_core: int
    device_memory: int
    memory_bandwidth: int
    l2_cache: int
    clock_rate_ghz: float
    bf16_flops: float
    fpus_per_core: int = 128
    threads_per_core: int = 2048


TARGETS: dict[str, GpuTarget] = {
    "A100": GpuTarget(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 167936, 85_097_971_712, 2_039_000_000_000, 41_943_040, 1.41,
        312e12, 64,
    ),
    "RTX 4090": GpuTarget(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 101376, 102400, 25_383_337_984, 1_008_096_000_000, 75_497_472, 2.52,
        165e12, threads_per_core=1536,
    ),
    "H200": GpuTarget(
        "NVIDIA H200", (9, 0), 132, 232448, 233472, 150_113_747_968, 4_917_120_000_000, 62_914_560, 1.98, 989e12
    ),
    "B200": GpuTarget(
        "NVIDIA B200", (10, 0), 148, 232448, 233472, 191_500_000_000, 7_672_000_000_000, 132_644_864, 1.965, 2250e12
    ),
}  # fmt: skip


def target_config(target: GpuTarget) -> str:
    """The text-format GpuTargetConfigProto of a GPU."""
    major, minor = target.compute_capability
    feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {target.shared_memory_per_core}
  shared_memory_per_block_optin: {target.shared_memory_per_block}
  threads_per_core_limit: {target.threads_per_core} core_count: {target.core_count}
  fpus_per_core: {target.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {target.memory_bandwidth} l2_cache_size: {target.l2_cache}
  clock_rate_ghz: {target.clock_rate_ghz} device_memory_size: {target.device_memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_address_bits: 64
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  name: "{target.name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{target.name}"
"""


@lru_cache
def target_mesh(gpu: str, num_devices: int = 1) -> Mesh:
    """A mesh with one axis "x" over `num_devices` described GPUs of one host.

    Raises: KeyError for an unknown GPU; RuntimeError where the CUDA plugin wheels are missing.
    """
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(TARGETS[gpu]), topology=f"1x1x{num_devices}"
    )
    return Mesh(np.array(topology.devices), ("x",))


def compile_for(gpu: str, function: Callable, *arguments: Any) -> Any:
    """`function`, jitted and compiled for one described GPU.

    Args:
      arguments: pytrees of jax.ShapeDtypeStruct.
    Returns: jax's compiled object: .memory_analysis(), .as_text().
    Raises: whatever the compiler says, shared-memory overflow of a kernel included.
    """
    mesh = target_mesh(gpu)
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(mesh.devices.flat[0]):
        return jax.jit(function).trace(*arguments).lower().compile()

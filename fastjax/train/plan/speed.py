"""An estimate of a step's time: FLOP at the GPU's sustained rate, and passes over memory at its bandwidth.

The H200's rates are measured (matmul 687 TFLOP/s for seconds, copy 4.3 TB/s); the others' are the same shares of their
makers' figures, and not measured.
"""

from fastjax.gpu_targets import GpuTarget
from fastjax.models.config import ModelConfig
from fastjax.models.remat import RematPlan
from fastjax.train.plan.costs import Workload, host_bytes, recomputed_flop, step_flop

_MATMUL_SHARE, _COPY_SHARE = 0.69, 0.87
# Passes over a layer's activations that are no matmul: norms, positions, SwiGLU, residuals, adapters, kept values.
_PASSES = 22
# Each way, of pinned memory over PCIe 5; a scan hides little of it.
_HOST_BYTES_PER_SECOND = 54e9


def step_seconds(
    config: ModelConfig, plan: RematPlan, target: GpuTarget, work: Workload, *, trains_base: bool = False
) -> float:
    """Estimated seconds of forward and backward of a micro-batch on one device."""
    flop = (
        step_flop(config, work.seq, trains_base=trains_base) + recomputed_flop(plan, config, work)
    ) * work.num_tokens
    query = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    widths = config.hidden_size + 2 * config.intermediate_size + query + 2 * kv
    moved = _PASSES * work.itemsize * widths * work.num_tokens * config.num_hidden_layers
    host = 2 * host_bytes(plan, config, work) / _HOST_BYTES_PER_SECOND
    return flop / (target.bf16_flops * _MATMUL_SHARE) + moved / (target.memory_bandwidth * _COPY_SHARE) + host

"""What keeping or recomputing an activation costs, from the shapes alone.

bytes(name) are those of one layer and token; flop(name) is what making it again takes, counted in matmul FLOP. Every
frozen matmul of width D has the same price, D FLOP a byte of its output; attention's grows with the row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from fastjax.kernels.lora.blocks import padded_rank
from fastjax.models.config import ModelConfig
from fastjax.models.remat import NAMES, Policy, RematPlan
from fastjax.train.loss import MLP_TOKENS, MLP_TOKENS_IF_SHORT

# An attention kernel reaches about this share of a matmul's FLOP a second.
_ATTENTION_EFFICIENCY = 0.6


# Of a token's MLP width, that its backward holds at once: gate, up, their product, and the gradients of these.
_MLP_ARRAYS = 7
# Adapters of rank 16 on all seven projections.
_USUAL_ADAPTERS = 7 * 16


@dataclass(frozen=True)
class Workload:
    """What a plan depends on beside the model: one micro-batch on one device.

    Attributes:
      seq: tokens of a row, padding included.  num_tokens: of all rows of the micro-batch.
      itemsize: bytes of an activation's element.
      adapter_width: columns that the adapters' x A have in one layer, see `adapter_width`; 0 without adapters.
    """

    seq: int
    num_tokens: int
    itemsize: int = 2
    adapter_width: int = _USUAL_ADAPTERS


def adapter_width(trainable: Any) -> int:
    """Columns of all x A of a layer, the padding that the kernels give each rank included.

    Args:
      trainable: the trained leaves of a model, abstract ones too.
    """
    flat = nnx.to_flat_state(trainable)
    ranks = [leaf.get_value().shape[-2] for path, leaf in flat if path[0] == "layers" and path[-1] == "lora_a"]
    return sum(padded_rank(rank) for rank in ranks)


@dataclass(frozen=True)
class LayerCosts:
    """One layer's activations, for each token.

    Attributes:
      num_bytes: name -> bytes that keeping it takes.
      flop: name -> FLOP that making it again takes.
    """

    num_bytes: Mapping[str, int]
    flop: Mapping[str, float]

    def kept_bytes(self, policy: Policy) -> int:
        """On the device, for each token."""
        return sum(self.num_bytes[name] for name in policy.saved)

    def host_bytes(self, policy: Policy) -> int:
        """In host memory, for each token."""
        return sum(self.num_bytes[name] for name in policy.offloaded)

    def recomputed_flop(self, policy: Policy) -> float:
        """For each token; what is kept or comes back from the host is not made again."""
        if policy.all:
            return 0.0
        return sum(self.flop[name] for name in NAMES if name not in (*policy.saved, *policy.offloaded))


def layer_costs(config: ModelConfig, work: Workload) -> LayerCosts:
    """Of a model's layers, with causal attention."""
    width, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    sizes = {
        "layer_in": width, "attn_in": width, "query": query, "key": kv, "value": kv, "attn_out": query, "mid": width,
        "mlp_in": width, "gate_up": 2 * inner, "inner": inner,
    }  # fmt: skip
    num_bytes = {name: size * work.itemsize for name, size in sizes.items()}
    num_bytes["attn_lse"] = config.num_attention_heads * 4
    num_bytes["lora_xa"] = work.adapter_width * work.itemsize
    attention = 4 * query * _seen_keys(config, work.seq) / _ATTENTION_EFFICIENCY
    flop = {
        "layer_in": 0.0, "query": 2.0 * width * query, "key": 2.0 * width * kv, "value": 2.0 * width * kv,
        "attn_out": attention, "attn_lse": 0.0, "mid": 2.0 * query * width, "gate_up": 4.0 * width * inner,
        "lora_xa": 0.0, "attn_in": 0.0, "mlp_in": 0.0, "inner": 0.0,
    }  # fmt: skip
    return LayerCosts(num_bytes, flop)


def step_flop(config: ModelConfig, seq: int, *, trains_base: bool = False) -> float:
    """FLOP of forward and backward for each token, adapters and recomputation apart.

    Args:
      trains_base: whether weights have gradients too.
    """
    width, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    weights = config.num_hidden_layers * (width * (2 * query + 2 * kv) + 3 * width * inner) + width * config.vocab_size
    attention = config.num_hidden_layers * 4 * query * _seen_keys(config, seq) / _ATTENTION_EFFICIENCY
    return (6.0 if trains_base else 4.0) * weights + 3.5 * attention


def kept_bytes(plan: RematPlan, config: ModelConfig, work: Workload) -> int:
    """Bytes that a plan keeps on the device between forward and backward."""
    costs = layer_costs(config, work)
    runs = plan.of_layers(config.num_hidden_layers)
    return sum(count * costs.kept_bytes(policy) * work.num_tokens for _, count, policy in runs)


def planned_bytes(plan: RematPlan, config: ModelConfig, work: Workload) -> int:
    """What differs between plans: the kept bytes, and the backward of one MLP, in pieces where none keeps its parts."""
    runs = plan.of_layers(config.num_hidden_layers)
    whole = any(policy.keeps("gate_up") for _, _, policy in runs)
    pieces = MLP_TOKENS_IF_SHORT if plan.offloads else MLP_TOKENS
    tokens = work.num_tokens if whole else min(work.num_tokens, pieces)
    mlp = _MLP_ARRAYS * tokens * config.intermediate_size * work.itemsize
    return kept_bytes(plan, config, work) + mlp


def host_bytes(plan: RematPlan, config: ModelConfig, work: Workload) -> int:
    """Bytes that a plan keeps in host memory."""
    costs = layer_costs(config, work)
    runs = plan.of_layers(config.num_hidden_layers)
    return sum(count * costs.host_bytes(policy) * work.num_tokens for _, count, policy in runs)


def recomputed_flop(plan: RematPlan, config: ModelConfig, work: Workload) -> float:
    """FLOP for each token that the backward pass makes again."""
    costs = layer_costs(config, work)
    return sum(count * costs.recomputed_flop(policy) for _, count, policy in plan.of_layers(config.num_hidden_layers))


def _seen_keys(config: ModelConfig, seq: int) -> float:
    """Keys that a token of a row sees, on average."""
    seen = min(seq, config.sliding_window or seq)
    return seen / 2 if seen == seq else seen

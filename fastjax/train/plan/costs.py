"""What keeping or recomputing an activation costs, from the shapes alone.

bytes(name) are those of one layer and token; flop(name) is what making it again takes, counted in matmul FLOP. Every
frozen matmul of width D has the same price, D FLOP a byte of its output; attention's grows with the row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fastjax.models.config import ModelConfig
from fastjax.models.remat import NAMES, Policy, RematPlan

# An attention kernel reaches about this share of a matmul's FLOP a second.
_ATTENTION_EFFICIENCY = 0.6


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


# Ranks are padded to a power of two of at least 16; adapters on all seven projections are counted.
_LEAST_RANK, _NUM_ADAPTERS = 16, 7


def layer_costs(config: ModelConfig, seq: int, itemsize: int = 2, rank: int = _LEAST_RANK) -> LayerCosts:
    """Of a model's layers for rows of `seq` tokens, causal.

    Args:
      itemsize: bytes of an activation's element.
      rank: of the adapters; 0 without.
    """
    width, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    sizes = {
        "layer_in": width, "query": query, "key": kv, "value": kv, "attn_out": query, "mid": width, "gate": inner,
        "up": inner,
    }  # fmt: skip
    num_bytes = {name: size * itemsize for name, size in sizes.items()}
    num_bytes["attn_lse"] = config.num_attention_heads * 4
    padded = max(_LEAST_RANK, 1 << (rank - 1).bit_length()) if rank else 0
    num_bytes["lora_xa"] = _NUM_ADAPTERS * padded * itemsize
    seen = min(seq, config.sliding_window or seq)
    attention = 4 * query * (seen / 2 if seen == seq else seen) / _ATTENTION_EFFICIENCY
    flop = {
        "layer_in": 0.0, "query": 2.0 * width * query, "key": 2.0 * width * kv, "value": 2.0 * width * kv,
        "attn_out": attention, "attn_lse": 0.0, "mid": 2.0 * query * width, "gate": 2.0 * width * inner,
        "up": 2.0 * width * inner, "lora_xa": 0.0,
    }  # fmt: skip
    return LayerCosts(num_bytes, flop)


def step_flop(config: ModelConfig, seq: int) -> float:
    """FLOP of forward and backward for each token, adapters and recomputation apart; weights are frozen."""
    width, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    weights = config.num_hidden_layers * (width * (2 * query + 2 * kv) + 3 * width * inner) + width * config.vocab_size
    seen = min(seq, config.sliding_window or seq)
    keys = seen / 2 if seen == seq else seen
    attention = config.num_hidden_layers * 4 * query * keys / _ATTENTION_EFFICIENCY
    return 4.0 * weights + 3.5 * attention


def kept_bytes(plan: RematPlan, config: ModelConfig, seq: int, num_tokens: int, itemsize: int = 2) -> int:
    """Bytes that a plan keeps on the device between forward and backward."""
    costs = layer_costs(config, seq, itemsize)
    runs = plan.of_layers(config.num_hidden_layers)
    return sum(count * costs.kept_bytes(policy) * num_tokens for _, count, policy in runs)


def host_bytes(plan: RematPlan, config: ModelConfig, seq: int, num_tokens: int, itemsize: int = 2) -> int:
    """Bytes that a plan keeps in host memory."""
    costs = layer_costs(config, seq, itemsize)
    runs = plan.of_layers(config.num_hidden_layers)
    return sum(count * costs.host_bytes(policy) * num_tokens for _, count, policy in runs)


def recomputed_flop(plan: RematPlan, config: ModelConfig, seq: int) -> float:
    """FLOP for each token that the backward pass makes again."""
    costs = layer_costs(config, seq)
    return sum(count * costs.recomputed_flop(policy) for _, count, policy in plan.of_layers(config.num_hidden_layers))

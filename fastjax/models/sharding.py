"""Where every weight, adapter, optimiser state and activation lies on a mesh: one table of rules, read by all.

A dimension of a weight has a logical name (`heads`, `inner`, `vocab`, ...), and `ShardingRules` says over which mesh
axes a logical dimension is split. Two kinds of split are different things:

  split for good   Megatron's tensor parallelism: a device computes with its part only. q, k, v, gate and up are cut by
                   output, o and down by input, embedding and head by vocabulary.
  stored in parts  FSDP: a device keeps a part, and the whole (or its `tensor` part) is gathered when a layer runs.

4-bit weights are cut the same way: codes and block scales together, along rows or at borders of 64 columns. Nested
scales and the offset are small and whole everywhere; a block finds its own by its position in the whole weight.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from fastjax.errors import UserError
from fastjax.kernels.nf4.tables import BLOCK_SIZE
from fastjax.models.config import ModelConfig

AXES = ("data", "fsdp", "tensor")
# Rows of a batch.
BATCH_AXES = ("data", "fsdp")


@dataclass(frozen=True)
class ShardingRules:
    """Logical dimension -> mesh axes that split it.

    Attributes:
      rows: of a batch, and of every activation.
      heads, kv_heads, inner: of activations and weights inside attention and the MLP.
      vocab: of the embedding and the head, and of the logits of the loss.
      width: of the residual stream.
      rank: of an adapter.
      stored: how the weight of a linear layer is kept, beside how it is split: over its outputs, else over its inputs.
        So is an embedding or head that is trained; a frozen one is read whole for every micro-batch, and kept whole.
    """

    rows: tuple[str, ...] = BATCH_AXES
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    inner: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)
    width: tuple[str, ...] = ()
    rank: tuple[str, ...] = ()
    stored: tuple[str, ...] = ("fsdp",)


# Module -> logical names of its weight's dimensions, [out, in].
LOGICAL: Mapping[str, tuple[str, str]] = {
    "q_proj": ("heads", "width"),
    "k_proj": ("kv_heads", "width"),
    "v_proj": ("kv_heads", "width"),
    "o_proj": ("width", "heads"),
    "gate_proj": ("inner", "width"),
    "up_proj": ("inner", "width"),
    "down_proj": ("width", "inner"),
    "embed_tokens": ("vocab", "width"),
    "lm_head": ("vocab", "width"),
}
_TABLES = ("embed_tokens", "lm_head")
_LEAF = re.compile(
    rf"(?:^|\.)(?P<path>(?P<stack>layers\.\w+\.)?(?P<module>{'|'.join(LOGICAL)})"
    r"\.(?P<leaf>weight|bias|lora\.lora_a|lora\.lora_b|lora\.scale)(?:\.(?P<part>[\w.]+))?)$"
)


def leaf_name(path: tuple[Any, ...]) -> str:
    """A leaf's dotted name from its pytree path, without flax's `value` steps."""
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path]
    return ".".join(str(key) for key in keys if key != "value")


@dataclass(frozen=True)
class Layout:
    """The rules on one mesh for one model.

    Attributes:
      config: shapes of the model.
      data, fsdp, tensor: devices of each mesh axis.
    """

    config: ModelConfig
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    rules: ShardingRules = ShardingRules()

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh) -> "Layout":
        """The layout of a model on a mesh with the axes data, fsdp and tensor."""
        return cls(config, *(mesh.shape[axis] for axis in AXES))

    @property
    def repeats_kv(self) -> bool:
        """Whether there are fewer key/value heads than tensor ranks: the projections are whole everywhere, and each
        rank computes the one head that its query heads use."""
        return self.config.num_key_value_heads < self.tensor

    @property
    def splits_vocab(self) -> bool:
        """Whether embedding and head are split. A vocabulary that the ranks do not divide stays whole."""
        return self.tensor > 1 and self.config.vocab_size % self.tensor == 0

    def spec(self, name: str, shape: tuple[int, ...], *, trained: bool) -> PartitionSpec:
        """How an array is split; what no rule names, norms and scalars, is whole everywhere.

        Args:
          name: dotted name; an optimiser state's ends with its parameter's.
          shape: of the whole array.
          trained: whether it belongs to the trained weights or their states.
        """
        found = _LEAF.search(name)
        if not found or found["leaf"] == "lora.scale":
            return PartitionSpec()
        module, part = found["module"], found["part"] or ""
        stack = (None,) if found["stack"] else ()
        out, inn = (self._axes(logical) for logical in LOGICAL[module])
        match found["leaf"]:
            case "bias":
                return _spec(*stack, _entry(out))
            case "lora.lora_a":
                return _spec(*stack, None, _entry(inn))
            case "lora.lora_b":
                return _spec(*stack, _entry(out), None)
        if len(shape) != len(stack) + 2 or part.rpartition(".")[2].startswith("nested"):
            return PartitionSpec()
        unit = {"codes": BLOCK_SIZE // 2, "absmax": 1}.get(part.rpartition(".")[2], 1)
        if self.fsdp > 1 and (trained or module not in _TABLES):
            num_out, num_in = shape[-2], shape[-1] // unit
            if num_out % (self._size(out) * self.fsdp) == 0:
                out = (*out, *self.rules.stored)
            elif num_in % (self._size(inn) * self.fsdp) == 0 and shape[-1] % unit == 0:
                inn = (*inn, *self.rules.stored)
        return _spec(*stack, _entry(out), _entry(inn))

    def specs(self, tree: Any, *, trained: bool) -> Any:
        """`spec` of every leaf of a state of weights, as a tree of the same structure."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.spec(leaf_name(path), leaf.shape, trained=trained), tree
        )

    def state_specs(self, opt_state: Any, trainable: Any) -> Any:
        """The optimiser state's: a moment lies where its weight lies, and so do the scales of an 8-bit one."""
        flat = jax.tree_util.tree_flatten_with_path(trainable)[0]
        weights = {leaf_name(path): leaf.shape for path, leaf in flat}

        def one(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            name = leaf_name(path)
            weight = next((w for w in weights if name.endswith(f".{w}")), None)
            if weight is None:
                return PartitionSpec()
            spec = self.spec(weight, weights[weight], trained=True)
            same = [i < len(leaf.shape) and leaf.shape[i] == size for i, size in enumerate(weights[weight])]
            return _spec(*(axes if equal else None for axes, equal in zip(spec, same, strict=False)))

        return jax.tree_util.tree_map_with_path(one, opt_state)

    def is_partial(self, name: str, spec: PartitionSpec) -> bool:
        """Whether each tensor rank has but a part of the gradient of a weight that is whole on all of them.

        So it is for what only a part of the heads, or of the vocabulary, is computed with.
        """
        found = _LEAF.search(name)
        if self.tensor == 1 or not found or any("tensor" in _axes_of(entry) for entry in spec):
            return False
        if self.repeats_kv and found["module"] in ("k_proj", "v_proj"):
            return True
        if found["module"] in _TABLES and not self.splits_vocab:
            return False
        return found["leaf"] in ("lora.lora_a", "lora.lora_b")

    def _axes(self, logical: str) -> tuple[str, ...]:
        whole = (logical == "kv_heads" and self.repeats_kv) or (logical == "vocab" and not self.splits_vocab)
        whole = whole or self.tensor == 1
        return () if whole else getattr(self.rules, logical)

    def _size(self, axes: tuple[str, ...]) -> int:
        return self.tensor if "tensor" in axes else 1


def check_layout(config: ModelConfig, data: int, fsdp: int, tensor: int, *, quantized: bool) -> None:
    """Raises: UserError, naming both numbers and the meshes that fit, for a mesh that does not divide the model."""
    problem = _problem(config, fsdp, tensor, quantized)
    if problem is not None:
        raise UserError(f"{problem}; {fitting_meshes(config, data * fsdp * tensor, quantized=quantized)}")


def fitting_meshes(config: ModelConfig, devices: int, *, quantized: bool) -> str:
    """The meshes of so many devices that divide the model, for a message."""
    fitting = [
        mesh_name(*shape) for shape in mesh_shapes(devices) if _problem(config, shape[1], shape[2], quantized) is None
    ]
    return f"meshes of {devices} devices that fit: {' | '.join(fitting)}"


def mesh_name(data: int, fsdp: int, tensor: int) -> str:
    """data=2,fsdp=2, as the command line takes it."""
    sizes = zip(AXES, (data, fsdp, tensor), strict=True)
    return ",".join(f"{axis}={size}" for axis, size in sizes if size > 1) or "data=1"


def mesh_shapes(devices: int) -> Iterator[tuple[int, int, int]]:
    """(data, fsdp, tensor) of every mesh of so many devices."""
    for data in range(1, devices + 1):
        for fsdp in range(1, devices // data + 1):
            if devices % data == 0 and devices // data % fsdp == 0:
                yield data, fsdp, devices // data // fsdp


def _problem(config: ModelConfig, fsdp: int, tensor: int, quantized: bool) -> str | None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for name, size in (("num_attention_heads", heads), ("intermediate_size", config.intermediate_size)):
        if size % tensor:
            return f"tensor={tensor} does not divide {name}={size}"
    if kv_heads % tensor and tensor % kv_heads:
        return f"tensor={tensor} is neither a divisor nor a multiple of num_key_value_heads={kv_heads}"
    inputs = {"num_attention_heads x head_dim": heads * config.head_dim, "intermediate_size": config.intermediate_size}
    whole = {"hidden_size": config.hidden_size} | inputs
    if quantized and fsdp * tensor > 1:
        for name, size in whole.items():
            if size % BLOCK_SIZE:
                return f"4-bit weights are cut at borders of {BLOCK_SIZE}, which does not divide {name}={size}"
        for name, size in inputs.items():
            if size // BLOCK_SIZE % tensor:
                return (
                    f"tensor={tensor} does not divide the {size // BLOCK_SIZE} blocks of {BLOCK_SIZE} in {name}={size}"
                )
    unit = BLOCK_SIZE if quantized else 1
    layout = Layout(config, 1, fsdp, tensor)
    sizes = {
        "q_proj": (heads * config.head_dim, config.hidden_size),
        "k_proj": (kv_heads * config.head_dim, config.hidden_size),
        "o_proj": (config.hidden_size, heads * config.head_dim),
        "gate_proj": (config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }
    for module, (num_out, num_in) in sizes.items():
        out, inn = (layout._size(layout._axes(logical)) for logical in LOGICAL[module])
        if num_out // out % fsdp and num_in // unit // inn % fsdp:
            size = config.hidden_size
            return f"fsdp={fsdp} divides neither side of {module}, {num_out} x {num_in} (hidden_size={size})"
    return None


def _spec(*entries: Any) -> PartitionSpec:
    """Without what says nothing at its end: jax takes P(None) and P() for two different shardings."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


def _entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def dim_of(axis: str, spec: PartitionSpec | Sequence[Any]) -> int | None:
    """The dimension that a mesh axis splits; None if it splits none."""
    return next((dim for dim, entry in enumerate(spec) if axis in _axes_of(entry)), None)

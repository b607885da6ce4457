"""The table between HF's tensor names and places in our model tree, read in both directions.

A layer's tensors are stacked here: HF's `model.layers.3.mlp.up_proj.weight` is row 3 of `layers.mlp.up_proj.weight`.
Weights have the same layout on both sides, so nothing is transposed or permuted.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastjax.errors import UserError
from fastjax.models.checkpoint.checkpoint import TensorSource
from fastjax.models.values import shown

_LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip

# HF's name, with {layer} where it counts layers <-> our path.
TABLE: dict[str, str] = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    **{f"model.layers.{{layer}}.{norm}.weight": f"layers.{norm}.weight"
       for norm in ("input_layernorm", "post_attention_layernorm")},
    **{f"model.layers.{{layer}}.{linear}.{kind}": f"layers.{linear}.{kind}"
       for linear in _LINEARS for kind in ("weight", "bias")},
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}  # fmt: skip

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_HF_PATTERNS = {path: pattern for pattern, path in TABLE.items()}

# At most nine digits: int() is slow on more, and refuses thousands.
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")

# Buffers that old checkpoints carry; they follow from config.json.
_IGNORABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


@dataclass(frozen=True)
class Place:
    """Where one HF tensor belongs: a leaf of our tree, the layer in it (None if it has no layers), and its shape."""

    path: str
    layer: int | None
    shape: tuple[int, ...]


def places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """HF name -> Place for every tensor of a model tree.

    Args:
      shapes: our path -> shape of the leaf, [L, ...] where layers are stacked.
    """
    out: dict[str, Place] = {}
    for path, shape in shapes.items():
        pattern = _HF_PATTERNS[path]
        if "{layer}" not in pattern:
            out[pattern] = Place(path, None, shape)
        else:
            for layer in range(shape[0]):
                out[pattern.format(layer=layer)] = Place(path, layer, shape[1:])
    return out


def check_sizes(source: TensorSource, config: Mapping[str, Any]) -> None:
    """Compares a config.json with the depth and the embedding of a checkpoint, before anything of its size is laid out.

    Raises: UserError if it has more layers than the checkpoint, or another embedding. Values that are no sizes are left
      to ModelConfig, which names them.
    """
    layers = 1 + max((int(found[1]) for name in source.names() if (found := _LAYER.match(name))), default=-1)
    stated = config.get("num_hidden_layers")
    if isinstance(stated, int) and stated > layers:
        raise UserError(
            f"{source.describe()} holds {layers} layers, and config.json says num_hidden_layers={shown(stated)}; "
            "does config.json belong to these weights?"
        )
    sizes = [config.get("vocab_size"), config.get("hidden_size")]
    if EMBEDDING in source.names() and all(isinstance(size, int) and size > 0 for size in sizes):
        info = source.info(EMBEDDING)
        if list(info.shape) != sizes:
            raise UserError(
                f"{info.file}: {EMBEDDING} has shape {list(info.shape)}, expected {shown(sizes)} (vocab_size and "
                "hidden_size in config.json); does config.json belong to these weights?"
            )


def check_names(source: TensorSource, expected: Mapping[str, Place]) -> None:
    """Compares what a checkpoint holds with what the model needs, before any tensor is read.

    Raises: UserError naming file, key and expected shape of tensors that are missing, of another shape or of no
      floating-point type, or that the model has no place for.
    """
    held = set(source.names())
    missing = [name for name in expected if name not in held]
    if missing:
        name = missing[0]
        rest = f" ({_more(missing)})" if len(missing) > 1 else ""
        hint = ""
        if name == HEAD:
            hint = "; a model whose head is its embedding says so by tie_word_embeddings: true in config.json"
        raise UserError(f"{source.describe()} has no {name}, expected shape {list(expected[name].shape)}{rest}{hint}")
    extra = [name for name in sorted(held) if name not in expected and not _IGNORABLE.fullmatch(name)]
    if extra:
        rest = f" ({_more(extra)})" if len(extra) > 1 else ""
        raise UserError(
            f"{source.info(extra[0]).file}: the model of config.json has no place for {extra[0]}{rest}; "
            "does config.json belong to these weights?"
        )
    for name, place in expected.items():
        info = source.info(name)
        if info.shape != place.shape:
            raise UserError(f"{info.file}: {name} has shape {list(info.shape)}, expected {list(place.shape)}")
        if info.dtype not in ("float32", "float16", "bfloat16", "float64"):
            raise UserError(f"{info.file}: {name} has dtype {info.dtype}; float32, float16 and bfloat16 are read")


def _more(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    listed = ", ".join(names[1 : shown + 1])
    return f"and {len(names) - 1} more: {listed}" + (", ..." if len(names) > shown + 1 else "")

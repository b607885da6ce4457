"""Which weights of a model tree are 4-bit: the abstract tree that a loader fills."""

from collections.abc import Mapping
from typing import Any

import jax

from fastjax.errors import UserError
from fastjax.kernels.nf4 import abstract_weight
from fastjax.models.checkpoint.checkpoint import PackedFormat, TensorSource
from fastjax.models.checkpoint.names import HEAD, Place
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import Linear
from fastjax.models.quant_config import QuantConfig
from fastjax.models.quantized import MixedWeight, QuantizedParam

Formats = Mapping[str, PackedFormat | None]


def planned_formats(config: QuantConfig, expected: Mapping[str, Place], dtype: str) -> dict[str, PackedFormat | None]:
    """HF name -> the form that a tensor gets: every linear weight of a layer is quantised unless the config skips it.

    Args:
      dtype: of the weights before they are quantised.
    Raises: UserError for an entry of skip_modules that is no module of the model.
    """
    packed = PackedFormat(config.quant_type, config.double_quant, dtype)
    linear = [name for name, place in expected.items() if place.layer is not None and len(place.shape) == 2]
    modules = {name: name.removesuffix(".weight") for name in linear}
    for entry in config.skip_modules:
        alone = QuantConfig(skip_modules=(entry,))
        if not any(alone.skips(module) for module in (*modules.values(), HEAD.removesuffix(".weight"))):
            raise UserError(
                f"skip_modules: {entry!r} matches no linear module; they are called {modules[linear[0]]}, ..."
            )
    formats = {name: packed if name in modules and not config.skips(modules[name]) else None for name in expected}
    if not any(formats.values()):
        raise UserError(
            f"skip_modules={list(config.skip_modules)!r} skips every linear layer, so that nothing would be 4-bit; "
            "list fewer, or keep the model in 16 bit"
        )
    return formats


def lay_out_packed(
    model: CausalLM, formats: Formats, expected: Mapping[str, Place], source: TensorSource | None = None
) -> None:
    """Gives the Linears of an abstract model 4-bit weights where `formats` says so.

    Args:
      source: where the tensors come from, for messages.
    Raises: UserError naming file and tensor where a 4-bit tensor is no linear layer's weight, or the layers of one
      projection have different forms.
    """
    by_path: dict[str, list[str]] = {}
    for name, place in expected.items():
        by_path.setdefault(place.path, []).append(name)
    for path, names in by_path.items():
        packed = {name: found for name in names if (found := formats[name]) is not None}
        if not packed:
            continue
        *parts, leaf = path.split(".")
        module: Any = model
        for part in parts:
            module = getattr(module, part)
        first = next(iter(packed))
        if not isinstance(module, Linear) or leaf != "weight":
            raise UserError(f"{_file(source, first)}{first} is 4-bit, and only weights of linear layers can be")
        other = next((name for name in packed if packed[name] != packed[first]), None)
        if other is not None:
            raise UserError(
                f"{_file(source, other)}{other} is {_words(packed[other])}, and {first} is "
                f"{_words(packed[first])}; 4-bit layers of one projection must have one form"
            )
        module.weight = QuantizedParam(
            _abstract(module.weight.get_value(), packed[first], [n in packed for n in names])
        )


def _file(source: TensorSource | None, name: str) -> str:
    return "" if source is None else f"{source.info(name).file}: "


def _abstract(weight: Any, packed: PackedFormat, is_quantized: list[bool]) -> Any:
    *stack, num_out, num_in = weight.shape
    like = abstract_weight(
        (num_out, num_in),
        nested=packed.nested,
        quant_type=packed.quant_type,
        dtype=packed.dtype,
        num_layers=sum(is_quantized) if stack else None,
    )
    if all(is_quantized):
        return like
    dense: Any = jax.ShapeDtypeStruct((len(is_quantized) - sum(is_quantized), num_out, num_in), weight.dtype)
    return MixedWeight(like, dense, tuple(is_quantized))


def _words(packed: PackedFormat) -> str:
    return f"{packed.quant_type} of {packed.dtype} with {'nested' if packed.nested else 'float32'} block scales"

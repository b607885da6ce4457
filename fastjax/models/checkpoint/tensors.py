"""A model's tensors as files hold them: under HF's names, each fetched, decoded and merged when its turn comes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastjax.errors import UserError
from fastjax.kernels.nf4 import QuantizedWeight, quantize
from fastjax.models.checkpoint.bitsandbytes import packed_tensors
from fastjax.models.checkpoint.checkpoint import PackedFormat
from fastjax.models.checkpoint.names import HEAD, Place, places
from fastjax.models.checkpoint.safetensors_io import LazyTensor
from fastjax.models.decoder import CausalLM
from fastjax.models.host import to_host
from fastjax.models.layers import Linear, LoraParam, LoraScale
from fastjax.models.lora import module_at
from fastjax.models.merge import merged_layer
from fastjax.models.quant_config import QuantConfig
from fastjax.models.quantized import MixedWeight, QuantizedParam, full_shape, layer_weight, matrix, quantized_linears

FORMS = ("as_is", "merged", "merged_4bit")


def model_tensors(model: CausalLM, dtype: Any, form: str) -> dict[str, LazyTensor]:
    """Name -> tensor of everything that a saved model holds, see `save_model`.

    Raises: UserError for adapters that `form` does not merge.
    """
    state = nnx.state(model, lambda _, node: not isinstance(node, LoraParam | LoraScale))
    values = {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    if model.lm_head is not None:
        # A tied head with an adapter has the embedding's own variable, which the state holds once.
        values[HEAD] = model.lm_head.weight.get_value()
    adapted = next((path for path in values if _lora(model, path) is not None), None)
    if form == "as_is" and adapted is not None:
        raise UserError(f"the model has adapters ({adapted}, ...); merge them before it is saved as a model")
    tensors: dict[str, LazyTensor] = {}
    for name, place in places({path: full_shape(value) for path, value in values.items()}).items():
        packed = None if form == "merged" else _packed(values[place.path], place.layer)
        if packed is None:
            fetch = partial(_float, model, place, dtype)
            tensors[name] = LazyTensor(place.shape, dtype, lambda fetch=fetch: to_host(fetch()))  # type: ignore[misc]
        else:
            tensors |= _packed_tensors(model, name, place, packed)
    return tensors


def quantization_of(model: CausalLM) -> QuantConfig:
    """What is 4-bit in a model, as a config that names every linear layer that is not."""
    found = {".".join(map(str, path)): linear.weight.get_value() for path, linear in quantized_linears(model).items()}
    first = next(iter(found.values()))
    one = first.quantized if isinstance(first, MixedWeight) else first
    skipped = [] if "lm_head" in found else ["lm_head"]
    linears = {
        ".".join(map(str, path)): module for path, module in nnx.iter_modules(model) if isinstance(module, Linear)
    }
    for path, linear in linears.items():
        if not path.startswith("layers."):
            continue
        weight = linear.weight.get_value()
        for layer in range(model.config.num_hidden_layers):
            if _packed(weight, layer) is None:
                skipped.append(f"model.layers.{layer}.{path.removeprefix('layers.')}")
    return QuantConfig(one.quant_type, one.nested, tuple(skipped))


def _lora(model: CausalLM, path: str) -> Any:
    *module, leaf = path.split(".")
    return getattr(module_at(model, tuple(module)), "lora", None) if leaf == "weight" else None


def _packed(value: Any, layer: int | None) -> PackedFormat | None:
    """The form of a layer's 4-bit weight; None for one of another kind."""
    if isinstance(value, MixedWeight):
        assert layer is not None
        value = value.quantized if value.is_quantized[layer] else None
    if not isinstance(value, QuantizedWeight):
        return None
    return PackedFormat(value.quant_type, value.nested, value.dtype.name)


def _float(model: CausalLM, place: Place, dtype: Any) -> jax.Array:
    """[out, in] in `dtype` of one layer, decoded and merged; the cast runs on the device and halves what is copied."""
    *path, leaf = place.path.split(".")
    module = module_at(model, tuple(path))
    variable = getattr(module, leaf)
    weight = layer_weight(variable.get_value(), place.layer)
    lora = _lora(model, place.path)
    if lora is None:
        return matrix(weight, dtype)
    at: Any = ... if place.layer is None else place.layer
    return merged_layer(matrix(weight, jnp.float32), lora.lora_a[at], lora.lora_b[at], lora.scale[at], dtype)


def _packed_tensors(model: CausalLM, name: str, place: Place, packed: PackedFormat) -> dict[str, LazyTensor]:
    fetch: Callable[[], QuantizedWeight]
    if _lora(model, place.path) is None:
        *path, leaf = place.path.split(".")
        variable: QuantizedParam = getattr(module_at(model, tuple(path)), leaf)

        def fetch() -> QuantizedWeight:
            weight = layer_weight(variable.get_value(), place.layer)
            assert isinstance(weight, QuantizedWeight)
            return weight
    else:

        def fetch() -> QuantizedWeight:
            merged = _float(model, place, packed.dtype)
            return quantize(merged, quant_type=packed.quant_type, nested=packed.nested)

    return packed_tensors(name, (place.shape[0], place.shape[1]), packed, fetch)

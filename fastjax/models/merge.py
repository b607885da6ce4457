"""Adapters folded into the weights they adapt."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastjax.models.decoder import CausalLM
from fastjax.models.layers import Linear, TrainedParam
from fastjax.models.quantized import MixedWeight, full_shape, layer_weight, matrix, quantized_linears


def merge_lora(model: CausalLM, dtype: Any = None, *, keep: bool = False) -> CausalLM:
    """A plain model: W + scale B A summed in float32 and rounded once, modules_to_save in their place.

    4-bit weights are decoded, those without an adapter too, and become weights of their own dtype. One projection at a
    time, and one layer of it in float32: where `dtype` is the weights' own, they are updated in their own memory. A
    head that no longer equals the embedding makes the config say tie_word_embeddings false.

    Args:
      model: is used up, unless `keep`.
      dtype: of every weight of the result; None keeps each weight's own (a trained copy takes the final norm's).
      keep: leave `model` as it is; the result then has a second copy of every adapted weight.
    Returns: the model without adapters: the same object, unless `keep`.
    """
    if keep:
        model = nnx.merge(*nnx.split(model))
    dtype = None if dtype is None else jnp.dtype(dtype)
    trained_dtype = dtype or model.norm.weight.dtype
    tied = model.lm_head is None
    for _, linear in list(nnx.iter_modules(model)):
        if not isinstance(linear, Linear) or linear.lora is None:
            continue
        weight, lora = linear.weight, linear.lora
        target = trained_dtype if isinstance(weight, TrainedParam) else dtype or own_dtype(linear)
        # An adapted head may share its weight with the embedding, which stays the base's.
        shared = linear is model.lm_head and weight is model.embed_tokens.weight
        factors = (lora.lora_a[...], lora.lora_b[...], lora.scale[...])
        if linear.is_quantized:
            merged = _merge_decoded(weight.get_value(), *factors, target)
        else:
            in_place = not keep and not shared and weight.dtype == target
            merged = (_merge_in_place if in_place else _merge_copy)(weight[...], *factors, target)
        linear.weight = nnx.Param(merged)
        linear.lora = None
    for linear in quantized_linears(model).values():
        target = dtype or own_dtype(linear)
        linear.weight = nnx.Param(_decoded(linear.weight.get_value(), target))
    for _, module in list(nnx.iter_modules(model)):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, TrainedParam):
                setattr(module, name, nnx.Param(variable[...].astype(trained_dtype)))
            elif isinstance(variable, nnx.Param) and dtype is not None and variable.dtype != dtype:
                setattr(module, name, nnx.Param(variable[...].astype(dtype)))
    if not tied and model.config.tie_word_embeddings:
        model.config = dataclasses.replace(model.config, tie_word_embeddings=False)
    return model


def own_dtype(linear: Linear) -> Any:
    """The dtype of a Linear's weight; of a 4-bit one, that of the values it stands for."""
    value = linear.weight.get_value()
    return value.quantized.dtype if isinstance(value, MixedWeight) else value.dtype


@partial(jax.jit, static_argnames="dtype")
def merged_layer(weight: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """W + scale B A of one layer, summed in float32 and rounded once.

    Args:
      weight: [out, in] float.  lora_a: [R, in].  lora_b: [out, R].  scale: scalar.
    Returns: [out, in] in `dtype`.
    """
    delta = jnp.matmul(lora_b, lora_a, precision=jax.lax.Precision.HIGHEST) * scale
    return (weight.astype(jnp.float32) + delta).astype(dtype)


def _decoded(value: Any, dtype: Any) -> jax.Array:
    """[*stack, out, in]: a 4-bit weight as a float one."""
    stack = full_shape(value)[:-2]
    if not stack:
        return matrix(value, dtype)
    return jnp.stack([matrix(layer_weight(value, layer), dtype) for layer in range(stack[0])])


def _merge_decoded(value: Any, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    if not full_shape(value)[:-2]:
        return merged_layer(matrix(value, jnp.float32), lora_a, lora_b, scale, dtype)
    layers = zip(range(len(lora_a)), lora_a, lora_b, scale, strict=True)
    return jnp.stack(
        [merged_layer(matrix(layer_weight(value, i), jnp.float32), a, b, s, dtype) for i, a, b, s in layers]
    )


@partial(jax.jit, static_argnames="dtype")
def _merge_copy(weight: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    if weight.ndim == 2:
        return merged_layer(weight, lora_a, lora_b, scale, dtype)
    layers = (weight, lora_a, lora_b, scale)
    return jax.lax.map(lambda layer: merged_layer(layer[0], layer[1], layer[2], layer[3], dtype), layers)


@partial(jax.jit, static_argnames="dtype", donate_argnums=0)
def _merge_in_place(weight: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    if weight.ndim == 2:
        return merged_layer(weight, lora_a, lora_b, scale, dtype)

    def body(layer: jax.Array, merged: jax.Array) -> jax.Array:
        one = merged_layer(merged[layer], lora_a[layer], lora_b[layer], scale[layer], dtype)
        return merged.at[layer].set(one)

    return jax.lax.fori_loop(0, weight.shape[0], body, weight)

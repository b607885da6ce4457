"""Adapters folded into the weights they adapt."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastjax.models.decoder import CausalLM
from fastjax.models.layers import Linear, TrainedParam


def merge_lora(model: CausalLM, dtype: Any = None, *, keep: bool = False) -> CausalLM:
    """A plain model: W + scale B A summed in float32 and rounded once, modules_to_save in their place.

    One projection at a time, and one layer of it in float32: where `dtype` is the weights' own, they are updated in
    their own memory. A head that no longer equals the embedding makes the config say tie_word_embeddings false.

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
        weight = linear.weight
        target = trained_dtype if isinstance(weight, TrainedParam) else dtype or weight.dtype
        # An adapted head may share its weight with the embedding, which stays the base's.
        shared = linear is model.lm_head and weight is model.embed_tokens.weight
        lora = linear.lora
        in_place = not keep and not shared and weight.dtype == target
        merge = _merge_in_place if in_place else _merge_copy
        linear.weight = nnx.Param(merge(weight[...], lora.lora_a[...], lora.lora_b[...], lora.scale[...], target))
        linear.lora = None
    for _, module in list(nnx.iter_modules(model)):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, TrainedParam):
                setattr(module, name, nnx.Param(variable[...].astype(trained_dtype)))
            elif isinstance(variable, nnx.Param) and dtype is not None and variable.dtype != dtype:
                setattr(module, name, nnx.Param(variable[...].astype(dtype)))
    if not tied and model.config.tie_word_embeddings:
        model.config = dataclasses.replace(model.config, tie_word_embeddings=False)
    return model


def _merge_layer(weight: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    delta = jnp.matmul(lora_b, lora_a, precision=jax.lax.Precision.HIGHEST) * scale
    return (weight.astype(jnp.float32) + delta).astype(dtype)


@partial(jax.jit, static_argnames="dtype")
def _merge_copy(weight: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    if weight.ndim == 2:
        return _merge_layer(weight, lora_a, lora_b, scale, dtype)
    layers = (weight, lora_a, lora_b, scale)
    return jax.lax.map(lambda layer: _merge_layer(layer[0], layer[1], layer[2], layer[3], dtype), layers)


@partial(jax.jit, static_argnames="dtype", donate_argnums=0)
def _merge_in_place(weight: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    if weight.ndim == 2:
        return _merge_layer(weight, lora_a, lora_b, scale, dtype)

    def body(layer: jax.Array, merged: jax.Array) -> jax.Array:
        one = _merge_layer(merged[layer], lora_a[layer], lora_b[layer], scale[layer], dtype)
        return merged.at[layer].set(one)

    return jax.lax.fori_loop(0, weight.shape[0], body, weight)

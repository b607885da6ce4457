"""Adapters in and out of a model tree: where they are added, and what of the tree is trained."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fastjax.errors import UserError
from fastjax.models.decoder import CausalLM
from fastjax.models.layers import Linear, Lora, LoraParam, TrainedParam
from fastjax.models.lora_config import (
    ALL_LINEAR,
    EMBEDDING,
    HEAD,
    AdapterPlan,
    LoraConfig,
    Path,
    Target,
    plan_adapter,
)
from fastjax.models.quantized import is_quantized

__all__ = ["ALL_LINEAR", "LoraConfig", "adapted_modules", "apply_lora", "has_adapter", "split_trainable"]

METHODS = ("qlora", "lora", "full")

Factors = Callable[[Path, Sequence[Target], Linear], tuple[Any, Any]]


def apply_lora(model: CausalLM, config: LoraConfig, rng: jax.Array) -> CausalLM:
    """Adds fresh adapters, and the float32 copies of modules_to_save, to `model`.

    A module's initial A depends on `rng` and its own name only, not on which others are adapted. A layer without
    adapter, or with a smaller rank than its neighbours, is zero in the padding of the stacked A and B.

    Args:
      rng: key of the initial values.
    Returns: the same model. It may be abstract, inside `nnx.eval_shape`.
    Raises: UserError if the model already has adapters, or the config fits no module (see `plan_adapter`).
    """
    plan = plan_adapter(config, model)

    def initial(path: Path, targets: Sequence[Target], linear: Linear) -> tuple[jax.Array, jax.Array]:
        return _initial_factors(config, jax.random.fold_in(rng, zlib.crc32(".".join(path).encode())), targets, linear)

    attach(model, plan, config.lora_dropout, initial)
    return model


def attach(model: CausalLM, plan: AdapterPlan, dropout: float, factors: Factors) -> None:
    """Puts the plan's adapters and trained copies into `model`.

    Args:
      factors: called with a stacked module's path, targets and Linear; returns
        A [*stack, R, in] and B [*stack, out, R], float32 and zero in the padding.
    """
    if has_adapter(model):
        raise UserError("the model already has adapters; merge them first, or load the base model again")
    if model.lm_head is None and not plan.keep_tied and (plan.trained or (HEAD,) in plan.by_path()):
        _give_own_head(model)
    for path, targets in plan.by_path().items():
        linear = module_at(model, path)
        stack = linear.shape[:-2]
        scale = np.zeros(stack, np.float32)
        for target in targets:
            scale[layer_slice(target)] = target.scale
        lora_a, lora_b = factors(path, targets, linear)
        linear.lora = Lora(jnp.asarray(lora_a), jnp.asarray(lora_b), jnp.asarray(scale), dropout)
    for name in plan.trained:
        # A head that stays tied is the embedding, whichever of the two was named.
        owner = model.embed_tokens if name == EMBEDDING or model.lm_head is None else model.lm_head
        # A copy even of float32 weights: the step donates what it trains, and the base may be shared.
        owner.weight = TrainedParam(jnp.array(owner.weight[...], jnp.float32, copy=True))


def split_trainable(model: CausalLM, method: str) -> tuple[Any, Any, Any]:
    """(graphdef, trainable, frozen), of which `nnx.merge(graphdef, trainable, frozen)` is the model.

    Args:
      method: "lora" and "qlora" train adapters and modules_to_save. "full" trains every weight: they become float32 in
        `model` itself, leaf by leaf (computing stays in model.dtype, which the layers cast to).
    Raises: UserError for another method, "lora" or "qlora" without adapters, or "full" with, or over 4-bit weights.
    """
    if method not in METHODS:
        raise UserError(f"method={method!r} is not known; choose one of {', '.join(METHODS)}")
    if method == "full":
        if has_adapter(model):
            raise UserError("method='full' trains every weight, and this model has adapters; merge them first")
        if is_quantized(model):
            raise UserError("method='full' trains every weight, and 4-bit weights cannot be trained; use 16-bit ones")
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param):
                # float16 and bfloat16 lose the small updates of a small learning rate.
                node.set_value(node[...].astype(jnp.float32))
        return _three(nnx.split(model, nnx.Param, ...))
    if not has_adapter(model):
        raise UserError(f"method={method!r} on a model without adapters; call apply_lora or load_adapter first")
    return _three(nnx.split(model, nnx.Any(LoraParam, TrainedParam), ...))


def has_adapter(model: CausalLM) -> bool:
    """Whether the model has an adapter or a trained copy of modules_to_save."""
    return any(isinstance(node, Lora | TrainedParam) for _, node in nnx.iter_graph(model))


def adapted_modules(model: CausalLM) -> list[str]:
    """HF names of the linear modules that have an adapter, layer by layer."""
    names: list[tuple[int, str]] = []
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, Linear) or module.lora is None:
            continue
        parts = tuple(str(part) for part in path)
        if module.lora.scale.shape == ():
            names.append((model.config.num_hidden_layers, ".".join(parts)))
            continue
        scale = jax.device_get(module.lora.scale[...])
        names += [(i, f"model.layers.{i}.{'.'.join(parts[1:])}") for i in range(len(scale)) if scale[i] != 0]
    return [name for _, name in sorted(names)]


def module_at(model: CausalLM, path: Path) -> Any:
    """The module that a path of attribute names leads to."""
    module: Any = model
    for name in path:
        module = getattr(module, name)
    return module


def layer_slice(target: Target) -> tuple[Any, ...]:
    """The index of a target's layer in its stacked arrays; () where nothing is stacked."""
    return () if target.layer is None else (target.layer,)


def _three(parts: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    graphdef, trainable, frozen = parts
    return graphdef, trainable, frozen


def _give_own_head(model: CausalLM) -> None:
    # The weight is the embedding's own variable: an adapter on the head needs no second copy of it. A trained copy of
    # either then takes its place on one side only.
    width, vocab = model.config.hidden_size, model.config.vocab_size
    head = nnx.eval_shape(lambda: Linear(width, vocab, rngs=nnx.Rngs(0)))
    head.weight = model.embed_tokens.weight
    model.lm_head = head


def _initial_factors(
    config: LoraConfig, rng: jax.Array, targets: Sequence[Target], linear: Linear
) -> tuple[jax.Array, jax.Array]:
    """A [*stack, R, in] and B [*stack, out, R], float32, zero where a layer has no adapter or a smaller rank."""
    *stack, out_features, in_features = linear.shape
    num_layers, rank = math.prod(stack), max(target.rank for target in targets)
    ranks = np.zeros(num_layers, np.int32)
    for target in targets:
        ranks[target.layer or 0] = target.rank
    own = np.maximum(ranks, 1)[:, None, None]
    used = np.arange(rank) < ranks[:, None]
    shape_a, shape_b = (num_layers, rank, in_features), (num_layers, out_features, rank)
    key_a, key_b = jax.random.split(rng)
    if config.init_lora_weights == "gaussian":
        lora_a = jax.random.normal(key_a, shape_a, jnp.float32) / own
    else:
        lora_a = _uniform(key_a, shape_a, in_features)
    lora_b = jnp.zeros(shape_b, jnp.float32)
    if config.init_lora_weights is False:
        lora_b = jnp.where(used[:, None, :], _uniform(key_b, shape_b, own), 0)
    lora_a = jnp.where(used[:, :, None], lora_a, 0)
    return lora_a.reshape(*stack, rank, in_features), lora_b.reshape(*stack, out_features, rank)


def _uniform(rng: jax.Array, shape: tuple[int, ...], num_inputs: Any) -> jax.Array:
    """torch's initial Linear: kaiming_uniform(a=sqrt(5)), which is uniform within 1 / sqrt(inputs)."""
    return jax.random.uniform(rng, shape, jnp.float32, -1, 1) / np.sqrt(num_inputs).astype(np.float32)

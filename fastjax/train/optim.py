"""AdamW with torch's arithmetic, over the trainable leaves only."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fastjax.errors import UserError
from fastjax.train.adam_states import scale_by_adam_8bit, scale_by_adam_bf16
from fastjax.train.schedule import Schedule

# transformers.Trainer.get_decay_parameter_names: biases and norms keep their size, everything else decays, LoRA's A and
# B included.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class ClipState(NamedTuple):
    """Clipping keeps nothing between steps."""


def parameter_name(path: tuple[Any, ...]) -> str:
    """A leaf's dotted name, e.g. `layers.self_attn.q_proj.lora.lora_a`, from its pytree path."""
    keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path]
    # The last entry of a flax variable's path is its `value` attribute, which no checkpoint knows.
    if keys and isinstance(path[-1], jax.tree_util.GetAttrKey) and keys[-1] == "value":
        keys = keys[:-1]
    return ".".join(str(k) for k in keys)


def decay_mask(tree: Any) -> Any:
    """True for each leaf that weight decay shrinks: all but norms and biases, as Hugging Face's Trainer decides."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _NO_DECAY.search(parameter_name(path).lower()) is None, tree
    )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)), norm being that of all leaves together.

    Source: torch.nn.utils.clip_grad_norm_ (optax's own has no 1e-6).
    """

    def update(updates: Any, state: ClipState, params: Any = None) -> tuple[Any, ClipState]:
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * scale, updates), state

    return optax.GradientTransformation(lambda params: ClipState(), update)


def _as_float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def _scale_by_adam_float32(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """optax's Adam whose moments are float32 whatever the dtype of the leaf: bfloat16 loses (1 - b2) g^2."""
    adam = optax.scale_by_adam(b1, b2, eps)
    return optax.GradientTransformation(
        lambda params: adam.init(_as_float32(params)),
        lambda updates, state, params=None: adam.update(_as_float32(updates), state),
    )


def _num_stacked(path: tuple[Any, ...]) -> int:
    """A decoder's layers lie in one leaf, stacked over its first dimension."""
    return int(parameter_name(path).startswith("layers."))


def _scale_by_adam(optim: str, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    match optim:
        case "adamw":
            return _scale_by_adam_float32(b1, b2, eps)
        case "adamw_8bit":
            return scale_by_adam_8bit(b1, b2, eps, _num_stacked)
        case "adamw_bf16":
            return scale_by_adam_bf16(b1, b2, eps)
    raise UserError(f"optim={optim!r} is not known; known: adamw, adamw_8bit, adamw_bf16")


def make_optimizer(
    schedule: Schedule,
    *,
    optim: str = "adamw",
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_epsilon: float = 1e-8,
) -> optax.GradientTransformation:
    """Clipping, AdamW with decoupled decay, and the learning rate of the step, as one optax transformation.

    p <- p - lr (m_hat / (sqrt(v_hat) + eps) + decay p). Give it the trainable leaves alone: what it never sees has no
    buffers, no decay, and no part in the norm.

    Args:
      optim: "adamw" keeps both moments in float32, "adamw_8bit" in blocks of 8 bits, "adamw_bf16" in bfloat16.
      max_grad_norm: None or 0 leaves gradients as they are.
    Raises: UserError for an optimiser that is not there, or numbers outside their range.
    Source: torch.optim.AdamW and bitsandbytes.optim.AdamW8bit; decay groups from transformers.Trainer.
    """
    adam = _scale_by_adam(optim, adam_beta1, adam_beta2, adam_epsilon)
    if not weight_decay >= 0:
        raise UserError(f"weight_decay={weight_decay} must be 0 or more")
    for name, beta in (("adam_beta1", adam_beta1), ("adam_beta2", adam_beta2)):
        if not 0 <= beta < 1:
            raise UserError(f"{name}={beta} must be at least 0 and below 1")
    if max_grad_norm is not None and not max_grad_norm >= 0:
        raise UserError(f"max_grad_norm={max_grad_norm} must be 0 (no clipping) or more")
    # What is turned off keeps its place: a saved state names its leaves by it.
    return optax.chain(
        clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity(),
        adam,
        optax.add_decayed_weights(weight_decay, decay_mask) if weight_decay else optax.identity(),
        optax.scale_by_learning_rate(schedule),
    )


def step_count(opt_state: Any) -> jax.Array:
    """int32 scalar: the updates that this optimiser state has seen."""
    for leaf in jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState)):
        if isinstance(leaf, optax.ScaleByAdamState):
            return leaf.count
    raise AssertionError("an optimiser state without Adam's count")

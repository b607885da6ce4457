"""AdamW's moments in fewer bytes than float32: blocks of 8 bits, or bfloat16.

Both are `optax.ScaleByAdamState`s, whose moments are arrays in trees of the parameters' structure, so that a checkpoint
names them as it names the parameters. The update is computed in float32 from the new moments before they are rounded.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fastjax.kernels.quantized_state import dequantize_state, quantize_state
from fastjax.kernels.quantized_state.reference import absmax_shape, zero_code

# bitsandbytes' min_8bit_size: in a small tensor there is nothing to save, and norms are sensitive.
MIN_8BIT_SIZE = 4096
_LARGE = 2**26


class BlockMoments(NamedTuple):
    """One moment of every parameter.

    Attributes:
      values: uint8 codes in the parameter's shape, or float32 for a parameter below MIN_8BIT_SIZE.
      absmax: float32 scales of the blocks of 256, None for such a parameter.
    """

    values: Any
    absmax: Any


def scale_by_adam_8bit(
    b1: float, b2: float, eps: float, num_stacked: Callable[[tuple[Any, ...]], int] = lambda path: 0
) -> optax.GradientTransformation:
    """m_hat / (sqrt(v_hat) + eps) with both moments kept in 8 bits.

    Args:
      num_stacked: from a leaf's pytree path, how many leading dimensions stack the tensors of several layers. Size
        limit and blocks are those of one layer's tensor.
    Source: bitsandbytes.optim.AdamW8bit, 0.50; 8-bit optimizers (arXiv:2110.02861).
    """

    def is_8bit(path: tuple[Any, ...], leaf: Any) -> bool:
        return math.prod(leaf.shape[num_stacked(path) :]) >= MIN_8BIT_SIZE

    def zeros(params: Any, signed: bool) -> BlockMoments:
        def codes(path: tuple[Any, ...], leaf: Any) -> jax.Array:
            if not is_8bit(path, leaf):
                return jnp.zeros(leaf.shape, jnp.float32)
            return jnp.full(leaf.shape, zero_code(signed), jnp.uint8)

        def absmax(path: tuple[Any, ...], leaf: Any) -> jax.Array | None:
            if not is_8bit(path, leaf):
                return None
            return jnp.zeros(absmax_shape(leaf.shape, num_stacked(path)), jnp.float32)

        return BlockMoments(
            jax.tree_util.tree_map_with_path(codes, params), jax.tree_util.tree_map_with_path(absmax, params)
        )

    def init(params: Any) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(params, True), zeros(params, False))

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> Any:
        count = optax.safe_increment(state.count)

        def one(stacked, gradient, m, m_absmax, v, v_absmax):
            m = dequantize_state(m, m_absmax, signed=True, num_stacked=stacked)
            v = dequantize_state(v, v_absmax, signed=False, num_stacked=stacked)
            m, v, step = _adam(gradient, m, v, count, b1, b2, eps)
            m, m_absmax = quantize_state(m, signed=True, num_stacked=stacked)
            return step, m, m_absmax, *quantize_state(v, signed=False, num_stacked=stacked)

        def leaf(path, gradient, m, m_absmax, v, v_absmax):
            if m_absmax is None:
                m, v, step = _adam(gradient, m, v, count, b1, b2, eps)
                return step, m, None, v, None
            operands = gradient, m, m_absmax, v, v_absmax
            if num_stacked(path) and gradient.size >= _LARGE:
                # The compiler keeps both float32 moments between the scales and the codes: those of one layer only.
                return jax.lax.map(lambda layer: one(num_stacked(path) - 1, *layer), operands)
            return one(num_stacked(path), *operands)

        step, m, m_absmax, v, v_absmax = _map_leaves(leaf, updates, *state.mu, *state.nu)
        return step, optax.ScaleByAdamState(count, BlockMoments(m, m_absmax), BlockMoments(v, v_absmax))

    return optax.GradientTransformation(init, update)


def scale_by_adam_bf16(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """m_hat / (sqrt(v_hat) + eps) with both moments kept in bfloat16.

    v moves by a part of 1 - b2 = 0.001 a step, which is less than half of bfloat16's last place and would always be
    rounded away; so v is rounded up or down at random, in proportion, with bits that follow from the step and the leaf.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> Any:
        count = optax.safe_increment(state.count)
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
        rng = jax.random.fold_in(jax.random.key(0), count)

        def leaf(path, gradient, m, v):
            m, v, step = _adam(gradient, m.astype(jnp.float32), v.astype(jnp.float32), count, b1, b2, eps)
            bits = jax.random.bits(jax.random.fold_in(rng, paths.index(path)), v.shape, jnp.uint16)
            return step, m.astype(jnp.bfloat16), stochastically_rounded(v, bits)

        step, m, v = _map_leaves(leaf, updates, state.mu, state.nu)
        return step, optax.ScaleByAdamState(count, m, v)

    return optax.GradientTransformation(init, update)


def stochastically_rounded(values: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 values as bfloat16, one of the two neighbours, each as likely as it is near.

    Args: bits: uint16, evenly distributed, in values' shape.
    """
    whole = jax.lax.bitcast_convert_type(values, jnp.uint32) + bits.astype(jnp.uint32)
    # The upper 16 bits are a bfloat16. A carry out of the lower ones is the step to the next number.
    return jax.lax.bitcast_convert_type((whole >> 16).astype(jnp.uint16), jnp.bfloat16)


def _adam(gradient, m, v, count, b1, b2, eps):
    """The new moments and the step, all float32. Source: bitsandbytes' CPU kernel, in words."""
    gradient = gradient.astype(jnp.float32)
    m = b1 * m + (1 - b1) * gradient
    v = b2 * v + (1 - b2) * jnp.square(gradient)
    step = m / _correction(b1, count) / (jnp.sqrt(v) / jnp.sqrt(_correction(b2, count)) + eps)
    return m, v, step


def _correction(beta, count):
    """1 - beta^count. For count = 1 and beta = 0.999 the difference of float32 numbers would be off by 1e-5."""
    return -jnp.expm1(count * (math.log(beta) if beta else -math.inf))


def _map_leaves(function, tree, *rest):
    """function(path, leaf, *leaves of rest) over a tree, as a tuple of trees; a leaf of rest may be None."""
    treedef: Any
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    columns = [treedef.flatten_up_to(other) for other in rest]
    results = [function(path, leaf, *row) for (path, leaf), *row in zip(paths, *columns, strict=True)]
    return tuple(treedef.unflatten(column) for column in zip(*results, strict=True))

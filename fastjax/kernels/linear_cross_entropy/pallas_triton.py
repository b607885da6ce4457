"""From a chunk's logits to its losses and to their gradient, as one Pallas-Triton kernel.

A row of logits is read twice, once for the logarithm of its sum and once for the gradient, which is written as it is
read; XLA reads it three times. The equations stand in `chunked`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from fastjax.kernels.linear_cross_entropy.blocks import Tiles, softmax_tiles


def _kernel(
    logits_ref,
    targets_ref,
    weights_ref,
    losses_ref,
    dlogits_ref,
    *,
    vocab: int,
    softcap: float | None,
    z_loss: float,
    tiles: Tiles,
):
    """Owns one row, in tiles of tiles.columns logits; every thread keeps the maximum and the sum of its own columns."""
    row = pl.program_id(0)
    num_tiles = pl.cdiv(vocab, tiles.columns)
    target, weight = targets_ref[row], weights_ref[row]

    def load(tile):
        column = tile * tiles.columns + jnp.arange(tiles.columns)
        inside = None if vocab % tiles.columns == 0 else column < vocab
        other = None if inside is None else -jnp.inf
        capped = plgpu.load(logits_ref.at[row, column], mask=inside, other=other)
        if softcap is not None:
            capped = softcap * jnp.tanh(capped / softcap)
            capped = capped if inside is None else jnp.where(inside, capped, -jnp.inf)
        return column, inside, capped

    def accumulate(tile, carry):
        maximum, total = carry
        _, _, logits = load(tile)
        larger = jnp.maximum(maximum, logits)
        # Columns past the vocabulary: -inf - -inf is no number.
        safe = jnp.where(larger == -jnp.inf, 0.0, larger)
        return larger, total * jnp.exp(maximum - safe) + jnp.exp(logits - safe)

    start = jnp.full((tiles.columns,), -jnp.inf, jnp.float32), jnp.zeros((tiles.columns,), jnp.float32)
    maxima, totals = jax.lax.fori_loop(0, num_tiles, accumulate, start)
    maximum = jnp.max(maxima)
    log_sum = maximum + jnp.log(jnp.sum(totals * jnp.exp(maxima - maximum)))
    target_logit = plgpu.load(logits_ref.at[row, target])
    if softcap is not None:
        target_logit = softcap * jnp.tanh(target_logit / softcap)
    losses_ref[row] = log_sum - target_logit + z_loss * log_sum * log_sum
    scale = weight * (1.0 + 2.0 * z_loss * log_sum)

    def write(tile, carry):
        column, inside, logits = load(tile)
        dlogits = scale * jnp.exp(logits - log_sum) - jnp.where(column == target, weight, 0.0)
        if softcap is not None:
            dlogits = dlogits * (1.0 - (logits / softcap) * (logits / softcap))
        plgpu.store(dlogits_ref.at[row, column], dlogits.astype(dlogits_ref.dtype), mask=inside)
        return carry

    jax.lax.fori_loop(0, num_tiles, write, 0)


def losses_and_gradient_pallas(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    dtype: jnp.dtype,
    *,
    softcap: float | None,
    z_loss: float,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `fastjax.kernels.linear_cross_entropy.chunked.losses_and_gradient`."""
    num_rows, vocab = logits.shape
    tiles = tiles or softmax_tiles(vocab)
    return pl.pallas_call(
        partial(_kernel, vocab=vocab, softcap=softcap, z_loss=z_loss, tiles=tiles),
        out_shape=(jax.ShapeDtypeStruct((num_rows,), jnp.float32), jax.ShapeDtypeStruct(logits.shape, dtype)),
        grid=(num_rows,),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="softmax_cross_entropy",
    )(logits, targets, weights)

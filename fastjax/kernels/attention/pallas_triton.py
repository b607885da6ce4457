"""Flash attention as Pallas-Triton kernels, and the gradient that joins them.

The equations stand in the forward's and the backward's modules. The forward rule names its output and log-sum-exp
itself: from outside, a checkpoint policy cannot reach the residuals of a custom_vjp, and saving only the output would
run the forward again for the other. With both names saved, the backward never does.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from fastjax.kernels.attention.blocks import DECODE_QUERIES, DecodeTiles, Tiles, decode_tiles, tiles_for
from fastjax.kernels.attention.options import Options
from fastjax.kernels.attention.pallas_triton_backward import backward_pallas, delta_pallas
from fastjax.kernels.attention.pallas_triton_decode import decode_pallas
from fastjax.kernels.attention.pallas_triton_forward import forward_pallas
from fastjax.kernels.attention.pallas_triton_masks import mask_arrays


@dataclass(frozen=True)
class Plan:
    """Tiles of each pass; decode is None where the queries are many. `interpret` runs them in jax's interpreter."""

    forward: Tiles
    dkey_dvalue: Tiles
    dquery: Tiles
    decode: DecodeTiles | None
    interpret: bool = False


# From so many keys a query on, bringing the queries into registers pays: it costs as much as a tile of 64 keys, and
# saves a fortieth of every tile.
_KEYS_FOR_REGISTERS = 4096


def seen_keys(options: Options, num_keys: int, *, is_packed: bool) -> int:
    """About how many keys a query sees from the first one on; 0 for windows and documents, which start anywhere."""
    if is_packed or options.window is not None:
        return 0
    return num_keys // 2 if options.causal else num_keys


def plan_for(query: jax.Array, key: jax.Array, *, splits_keys: bool, num_seen: int, interpret: bool) -> Plan:
    """The tiles for arrays of these shapes on the GPU that computations go to now; num_seen as from `seen_keys`."""
    batch, num_queries, _, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[-3:-1]
    padded_head = max(16, pl.next_power_of_2(head_dim))
    decode = None
    if splits_keys and num_queries <= DECODE_QUERIES:
        decode = decode_tiles(batch, num_kv_heads, num_keys, padded_head, query.dtype.itemsize)
    length = max(num_queries, num_keys)
    if interpret:
        # A pass over a tile costs the interpreter more than what is in it; two shapes keep rows and keys apart.
        by = 1 if length <= 512 else 8
        wide, tall = Tiles(32 * by, 64 * by, 4, 2), Tiles(64 * by, 32 * by, 4, 2)
        return Plan(wide, tall, wide, decode, interpret=True)
    forward, dkey_dvalue, dquery = (
        tiles_for(direction, padded_head, query.dtype, length) for direction in ("forward", "dkey_dvalue", "dquery")
    )
    if num_seen < _KEYS_FOR_REGISTERS:
        forward = replace(forward, query_in_registers=False)
    return Plan(forward, dkey_dvalue, dquery, decode)


def attention_pallas(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: Options,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    tile_bounds: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    seeds: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    interpret: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `fastjax.kernels.attention.attention`.

    Args:
      tile_bounds: as from `make_tile_bounds`; needed with segment_ids.
      seeds: [B, N, 2] uint32, for dropout.
      layer: index of key and value [L, B, S, K, H]; there is no gradient then.
      plan: None takes `plan_for`'s.
    """
    if plan is None:
        num_seen = seen_keys(options, key.shape[-3], is_packed=segment_ids is not None)
        splits_keys = segment_ids is None and seeds is None
        plan = plan_for(query, key, splits_keys=splits_keys, num_seen=num_seen, interpret=interpret)
    if positions is not None:
        positions = jnp.broadcast_to(positions, query.shape[:2])
    arrays = mask_arrays(positions, segment_ids, tile_bounds, kv_lengths, seeds, layer)
    if layer is not None:
        out, lse = _run_forward(query, key, value, arrays, options, plan)
        return (out, lse) if return_lse else out
    return _attention(query, key, value, arrays, options, plan, return_lse)


def _run_forward(query, key, value, arrays: dict[str, jax.Array], options: Options, plan: Plan):
    if key.ndim == 4:
        key, value = key[None], value[None]
    if plan.decode is not None:
        return decode_pallas(query, key, value, arrays, options, plan.decode, interpret=plan.interpret)
    return forward_pallas(query, key, value, arrays, options, plan.forward, interpret=plan.interpret)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attention(query, key, value, arrays: dict[str, jax.Array], options: Options, plan: Plan, return_lse: bool):
    out, lse = _run_forward(query, key, value, arrays, options, plan)
    return (out, lse) if return_lse else out


def _forward(query, key, value, arrays, options: Options, plan: Plan, return_lse: bool):
    out, lse = _run_forward(query, key, value, arrays, options, plan)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return (out, lse) if return_lse else out, (query, key, value, arrays, out, lse)


def _backward(options: Options, plan: Plan, return_lse: bool, residuals, cotangents):
    query, key, value, arrays, out, lse = residuals
    dout, dlse = cotangents if return_lse else (cotangents, None)
    delta = delta_pallas(out, dout, dlse, interpret=plan.interpret)
    operands = (query, key, value, dout, lse, delta, arrays)
    gradients = backward_pallas(*operands, options, plan.dkey_dvalue, plan.dquery, interpret=plan.interpret)
    return (*gradients, None)


_attention.defvjp(_forward, _backward)

"""The keys that a packed row's queries can see, found once a batch and shared by all layers.

For every token two spans of key indices: `first` .. `end` holds all tokens of its segment, `run_first` .. `run_end` is
the longest span around it that holds nothing else. From the spans of its tokens a tile of any size knows which tiles of
keys it may skip, and in which no pair of tokens has to be masked, without a table for each tile size. Documents that
lie in one piece have both spans equal.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Rows of the bounds.
FIRST, END, RUN_FIRST, RUN_END = range(4)


@jax.jit
def make_tile_bounds(segment_ids: Int[Array, "B T"]) -> Int[Array, "B 4 T"]:
    """What `attention(..., segment_ids=segment_ids, tile_bounds=...)` would otherwise find again in every layer.

    Args:
      segment_ids: [B, T] int; 0 marks padding, other ids may come in any order and in several pieces.
    Returns: [B, 4, T] int32: first, end, run_first and run_end of each token; of padding the empty spans (T, 0).
    Raises: ValueError for another shape.
    """
    if segment_ids.ndim != 2:
        raise ValueError(f"segment_ids {segment_ids.shape}: expected [B, T]")
    return jax.vmap(_row_bounds)(segment_ids)


def _row_bounds(ids: jax.Array) -> jax.Array:
    length = ids.shape[0]
    # A stable sort puts the pieces of a segment beside each other, its first token first.
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    group_first, group_end = _runs(ids[order])
    first = jnp.zeros(length, jnp.int32).at[order].set(order[group_first])
    end = jnp.zeros(length, jnp.int32).at[order].set(order[group_end - 1] + 1)
    run_first, run_end = _runs(ids)
    empty = jnp.array([length, 0, length, 0], jnp.int32)[:, None]
    return jnp.where(ids == 0, empty, jnp.stack([first, end, run_first, run_end]))


def _runs(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index and end of the run of equal ids that each element lies in."""
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    changes = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    first = jax.lax.cummax(jnp.where(changes, index, 0))
    is_last = jnp.concatenate([changes[1:], jnp.ones(1, bool)])
    return first, jax.lax.cummin(jnp.where(is_last, index + 1, ids.shape[0]), reverse=True)

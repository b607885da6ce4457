"""Tile sizes of the attention kernels, per GPU generation, head size, dtype and direction.

Measured ones stand in `tuned`. For any other GPU, not measured, the H200's tiles are taken and made smaller until they
fit the GPU's shared memory by the count below, first in stages, then in rows or keys, whichever is more; tests/aot
compiles what comes out for every generation, and a kernel that asks for too much fails there.
"""

from dataclasses import dataclass, replace

import jax

from fastjax.kernels._dispatch import target_device
from fastjax.kernels.attention.tuned import TUNED


@dataclass(frozen=True)
class Tiles:
    """rows queries by keys keys a tile, num_warps warps of 32 threads, num_stages tiles loaded ahead.

    Attributes:
      shared_mib: heads run side by side only as long as what each of them reads again and again fits in this many MiB
        of L2 cache, together.
      query_in_registers: forward only, in 16 bits: whether the queries are kept in registers, which Hopper's tensor
        cores can read.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    shared_mib: int = 24
    query_in_registers: bool = False


@dataclass(frozen=True)
class DecodeTiles:
    """keys keys a tile, split keys a program (a multiple of keys)."""

    keys: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class MosaicTiles:
    """rows queries a group of warps, keys keys a tile, slots tiles in shared memory."""

    rows: int
    keys: int
    slots: int


DIRECTIONS = ("forward", "dkey_dvalue", "dquery")
# Opt-in limit of one block, by compute capability; some are held back for what the compiler adds.
_SHARED_MEMORY = {"8.0": 166912, "8.6": 101376, "8.7": 166912, "8.9": 101376, "9.0": 232448, "10.0": 232448}
_SMALLEST_SHARED_MEMORY = 101376
_HELD_BACK = 2048
# T up to which the keys are split among programs instead of the queries.
DECODE_QUERIES = 16
# Programs that fill a large GPU a few times over.
_DECODE_PROGRAMS = 1024


def shared_memory(direction: str, tiles: Tiles, padded_head: int, itemsize: int) -> int:
    """Bytes of the operands that a block keeps in shared memory: what stays, and what is loaded ahead."""
    stays = {"forward": tiles.rows, "dkey_dvalue": 2 * tiles.keys, "dquery": 2 * tiles.rows}[direction]
    moves = 2 * (tiles.rows if direction == "dkey_dvalue" else tiles.keys)
    return itemsize * padded_head * (stays + moves * tiles.num_stages)


def tiles_for(direction: str, padded_head: int, dtype: jax.typing.DTypeLike, length: int) -> Tiles:
    """Tiles of one pass on the GPU that computations go to now.

    Args:
      direction: one of DIRECTIONS.
      padded_head: head size as the kernels see it, a power of two.
      length: the longer of T and S; no tile is longer than the next power of two.
    """
    capability = str(getattr(target_device(), "compute_capability", "9.0"))
    itemsize = jax.numpy.dtype(dtype).itemsize
    if itemsize == 4:
        # Three TF32 products for one: registers and compile time ask for small tiles.
        tiles = Tiles(32, 32, 4, 2) if padded_head <= 128 else Tiles(16, 16, 4, 2)
    else:
        head = min(max(padded_head, 64), 256)
        known = TUNED.get((capability, direction, head, itemsize))
        tiles = Tiles(*(known or TUNED["9.0", direction, head, itemsize]))
        if known is None:
            tiles = replace(tiles, query_in_registers=False)
    limit = _SHARED_MEMORY.get(capability, _SMALLEST_SHARED_MEMORY) - _HELD_BACK
    while shared_memory(direction, tiles, padded_head, itemsize) > limit and tiles.rows * tiles.keys > 16 * 16:
        if tiles.num_stages > 2:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.rows > tiles.keys:
            tiles = replace(tiles, rows=tiles.rows // 2)
        else:
            tiles = replace(tiles, keys=tiles.keys // 2)
    longest = max(16, 1 << (length - 1).bit_length())
    return replace(tiles, rows=min(tiles.rows, longest), keys=min(tiles.keys, longest))


def mosaic_tiles(head_dim: int) -> MosaicTiles:
    """Tiles of the forward on Hopper: what fits its shared memory and registers."""
    return MosaicTiles(rows=64, keys=128 if head_dim <= 128 else 64, slots=2)


def decode_tiles(batch: int, num_kv_heads: int, num_keys: int, padded_head: int, itemsize: int) -> DecodeTiles:
    """Tiles of the pass for few queries: enough parts of the keys to fill the GPU, and no part below one tile."""
    keys = 64 if padded_head * itemsize <= 256 else 32
    wanted = max(1, _DECODE_PROGRAMS // (batch * num_kv_heads))
    per_part = -(-num_keys // (wanted * keys))
    return DecodeTiles(keys=keys, split=keys * max(1, per_part), num_warps=4, num_stages=3)

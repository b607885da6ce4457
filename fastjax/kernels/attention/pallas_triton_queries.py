"""What the passes over queries share: the grid of their programs, and what each of them owns."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from fastjax.kernels.attention.blocks import Tiles
from fastjax.kernels.attention.pallas_triton_masks import key_limit, query_positions
from fastjax.kernels.attention.pallas_triton_parts import Call, head_sections
from fastjax.kernels.attention.pallas_triton_visits import Visit, keys_to_visit


@dataclass(frozen=True)
class QueryGrid:
    """Programs (member of a section, tile of queries, section): a section is the heads that run side by side.

    Long rows of tiles start first, so that short ones fill the gaps at the end.
    """

    call: Call
    batch: int
    num_heads: int
    section: int

    @classmethod
    def over(cls, call: Call, query: jax.Array, tiles: Tiles) -> "QueryGrid":
        batch, _, num_heads, head_dim = query.shape
        num_bytes = 2 * call.num_keys * head_dim * query.dtype.itemsize
        return cls(call, batch, num_heads, head_sections(batch * num_heads, call.group, num_bytes, tiles.shared_mib))

    @property
    def num_tiles(self) -> int:
        return self.call.padded_queries // self.call.rows

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.section, self.num_tiles, self.batch * self.num_heads // self.section

    def row_and_head(self, member, tile, section_index):
        del tile
        head = section_index * self.section + member
        return head // self.num_heads, head % self.num_heads

    def row_and_kv_head(self, *ids):
        row, head = self.row_and_head(*ids)
        return row, head // self.call.group

    def queries(self) -> pl.BlockSpec:
        """Block [rows, padded H] of a [B, T, N, H] array."""

        def block(member, tile, section_index):
            row, head = self.row_and_head(member, tile, section_index)
            return row, self.num_tiles - 1 - tile, head, 0

        return pl.BlockSpec((None, self.call.rows, None, self.call.padded_head), block)

    def numbers(self) -> pl.BlockSpec:
        """Block [rows] of a [B, N, T] array."""

        def block(member, tile, section_index):
            return *self.row_and_head(member, tile, section_index), self.num_tiles - 1 - tile

        return pl.BlockSpec((None, None, self.call.rows), block)


@dataclass(frozen=True)
class Owned:
    """The queries of one program: their indices, which of them exist (None: all), positions, and tiles of keys."""

    row: jax.Array
    inside: jax.Array | None
    positions: jax.Array
    visit: Visit
    limit: jax.Array | int


def owned_queries(call: Call, refs: dict) -> Owned:
    """Those of this program of a QueryGrid."""
    first_row = (pl.num_programs(1) - 1 - pl.program_id(1)) * call.rows
    row = first_row + jnp.arange(call.rows)
    inside = None if call.num_queries % call.rows == 0 else row < call.num_queries
    positions = query_positions(call, refs, row)
    return Owned(row, inside, positions, keys_to_visit(call, refs, first_row, positions), key_limit(call, refs))

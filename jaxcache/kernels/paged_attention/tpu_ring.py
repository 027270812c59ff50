"""From HBM to VMEM: KV chunks, fetched two ahead of their use, and the table rows that say where they lie.

A *chunk* is `blocks_per_chunk` consecutive blocks of a sequence (512 tokens). Chunks are used in the order of the
tiles and, within a tile, of the sequence. `SLOTS` slots of VMEM hold them in turn: one in use, two on their way.
The fetch cursor runs ahead across the end of a tile, so that no tile waits for its first chunk.

    scratch          shape                        filled by                        waited for
    chunks           [SLOTS, blocks, H, P, S, L]  copies of chunk n to n % SLOTS   before chunk n is used
    scales (int8)    [SLOTS, blocks, 1, H*2*S]    with the chunk                   with the chunk
    rows (SMEM)      [ROWS, W]                    copy of tile t's to t % ROWS     when the cursor enters tile t
    cursor (SMEM)    [4]                          `advance`, `retire`              -
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

AHEAD = 2
"""Chunks in flight while one is used. Three or more change nothing in the bundle counts."""

SLOTS = AHEAD + 1

ROWS = SLOTS + 2
"""Block-table rows held: the tile in use, the tiles that the chunk cursor may have entered, and one on its way."""

UNROLL = 8
"""Blocks per trip of the loop that fetches a partial chunk."""

FETCH_TILE, FETCH_CHUNK, FETCH_SLOT, USED = range(4)


class TileRefs(NamedTuple):
    """Scalars in SMEM before the kernel starts. `N` tiles, of which the first `count` are real."""

    layer: Any  # [1]
    count: Any  # [1]
    seq: Any  # [N] row of the block table
    pos: Any  # [N] position of the first query row
    kv_end: Any  # [N] one past the last position read
    first_block: Any = None  # [N] first block that the window reaches; absent without a window


class RingRefs(NamedTuple):
    """Scratch of the ring, see the module's table."""

    chunks: Any
    rows: Any
    cursor: Any
    chunk_sems: Any  # [SLOTS]
    row_sems: Any  # [ROWS]
    scales: Any = None


@dataclass(frozen=True)
class Ring:
    tiles: TileRefs
    ring: RingRefs
    kv: Any  # [layers, blocks, H, P, S, L] in HBM
    kv_scales: Any  # [layers, blocks, 1, H*2*S] in HBM, or None
    tables: Any  # [sequences, W] in HBM
    block_size: int
    blocks_per_chunk: int

    # ---- geometry of a tile

    def first_block(self, tile: Any) -> Any:
        return 0 if self.tiles.first_block is None else self.tiles.first_block[tile]

    def num_blocks(self, tile: Any) -> Any:
        return pl.cdiv(self.tiles.kv_end[tile], self.block_size) - self.first_block(tile)

    def num_chunks(self, tile: Any) -> Any:
        return pl.cdiv(self.num_blocks(tile), self.blocks_per_chunk)

    def blocks_in(self, tile: Any, chunk: Any) -> Any:
        return jnp.minimum(self.blocks_per_chunk, self.num_blocks(tile) - chunk * self.blocks_per_chunk)

    def block_id(self, tile: Any, chunk: Any, i: Any) -> Any:
        """Where block `i` of a chunk lies; the tile's table row must be there."""
        index = self.first_block(tile) + chunk * self.blocks_per_chunk + i
        return self.ring.rows[lax.rem(tile, ROWS), index]

    # ---- start and end

    def start(self) -> None:
        """Once, before the first tile: the first table rows and the first chunks."""
        for i in range(4):
            self.ring.cursor[i] = 0
        for tile in range(ROWS - 1):

            @pl.when(tile < self.tiles.count[0])
            def _(tile=tile):
                self._row_copy(tile).start()

        @pl.when(self.tiles.count[0] > 0)
        def _():
            self._row_copy(0).wait()

        lax.fori_loop(0, AHEAD, lambda _, carry: (self.fetch_next(), carry)[1], 0)

    def prefetch_row(self, tile: Any) -> None:
        """At the start of `tile`: ask for the table row that will be entered `ROWS - 1` tiles later."""
        ahead = tile + ROWS - 1

        @pl.when(ahead < self.tiles.count[0])
        def _():
            self._row_copy(ahead).start()

    def slot_in_use(self) -> Any:
        return lax.rem(self.ring.cursor[USED], SLOTS)

    # ---- fetching

    def full_fetches(self) -> Any:
        """How many of the next fetches are full chunks of the tile under the cursor."""
        tile = self.ring.cursor[FETCH_TILE]
        real = jnp.minimum(tile, self.tiles.count[0] - 1)
        left = lax.div(self.num_blocks(real), self.blocks_per_chunk) - self.ring.cursor[FETCH_CHUNK]
        return jnp.where(tile < self.tiles.count[0], left, 0)

    def fetch_full(self, tile: Any, chunk: Any, slot: Any) -> None:
        """Start all copies of a full chunk, without a branch: they ride in the bundles of the compute before."""
        for i in range(self.blocks_per_chunk):
            self._start_block(tile, chunk, slot, i)

    def fetch_next(self) -> None:
        """Start the copies of the chunk under the cursor, full or not, and move the cursor on."""
        tile, chunk, slot = (self.ring.cursor[i] for i in (FETCH_TILE, FETCH_CHUNK, FETCH_SLOT))

        @pl.when(tile < self.tiles.count[0])
        def _():
            n = self.blocks_in(tile, chunk)
            unrolled = lax.div(n, UNROLL) * UNROLL

            @pl.loop(0, lax.div(n, UNROLL))
            def _(group):
                for i in range(UNROLL):
                    self._start_block(tile, chunk, slot, group * UNROLL + i)

            @pl.loop(unrolled, n)
            def _(i):
                self._start_block(tile, chunk, slot, i)

            self.advance(1)

    def advance(self, chunks: Any) -> None:
        """Move the cursor over `chunks` fetched chunks, which reach at most to the end of its tile."""
        cursor = self.ring.cursor
        tile, chunk = cursor[FETCH_TILE], cursor[FETCH_CHUNK] + chunks
        cursor[FETCH_SLOT] = lax.rem(cursor[FETCH_SLOT] + chunks, SLOTS)
        done = chunk >= self.num_chunks(tile)
        cursor[FETCH_CHUNK] = jnp.where(done, 0, chunk)
        cursor[FETCH_TILE] = jnp.where(done, tile + 1, tile)

        @pl.when(done & (tile + 1 < self.tiles.count[0]))
        def _():
            self._row_copy(tile + 1).wait()

    # ---- using

    def wait_full(self, slot: Any) -> None:
        for ref in self._slot_refs(slot):
            pltpu.make_async_copy(ref, ref, self.ring.chunk_sems.at[slot]).wait()

    def wait_blocks(self, slot: Any, n: Any) -> None:
        for ref in self._slot_refs(slot):
            part = ref.at[pl.ds(0, n)]
            pltpu.make_async_copy(part, part, self.ring.chunk_sems.at[slot]).wait()

    def retire(self, chunks: Any) -> None:
        self.ring.cursor[USED] += chunks

    def first_lap(self) -> Any:
        """Whether the slot in use holds nothing older than its present chunk: its rest is uninitialised memory."""
        return self.ring.cursor[USED] < SLOTS

    # ---- copies

    def _slot_refs(self, slot: Any) -> list[Any]:
        refs = [self.ring.chunks, self.ring.scales]
        return [ref.at[slot] for ref in refs if ref is not None]

    def _start_block(self, tile: Any, chunk: Any, slot: Any, i: Any) -> None:
        block, layer, sem = self.block_id(tile, chunk, i), self.tiles.layer[0], self.ring.chunk_sems.at[slot]
        pltpu.make_async_copy(self.kv.at[layer].at[block], self.ring.chunks.at[slot, i], sem).start()
        if self.kv_scales is not None:
            pltpu.make_async_copy(self.kv_scales.at[layer].at[block], self.ring.scales.at[slot, i], sem).start()

    def _row_copy(self, tile: Any) -> Any:
        at = lax.rem(jnp.int32(tile), jnp.int32(ROWS))
        source = self.tables.at[pl.ds(self.tiles.seq[tile], 1)]
        return pltpu.make_async_copy(source, self.ring.rows.at[pl.ds(at, 1)], self.ring.row_sems.at[at])

"""What one step's device call is told about its sequences: a pytree of arrays, padded to a bucket."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

PAD_SLOT = np.iinfo(np.int32).max
"""The slot of a padding row: beyond any KV array, so that a write to it is dropped."""


class Tiles(NamedTuple):
    """Runs of at most `tile_size` query rows of one sequence, in row order; padding tiles have `kv_end` 0.

    Only sequences with more than one new token appear: the others are decodes, one row each.
    """

    seq: Int[Array, " N"]
    """Row of the block table."""
    row: Int[Array, " N"]
    """First query row in the batch."""
    pos: Int[Array, " N"]
    """Position of that row in its sequence."""
    kv_end: Int[Array, " N"]
    """One past the last KV position that the tile reads, which is that of its last row."""


class SharedRuns(NamedTuple):
    """Runs of blocks with which several decodes begin; `R` runs at most, the real ones first.

    A hint: block tables are whole all the same, and a backend that has no use for it reads those.
    """

    tables: Int[Array, "R W"]
    """Block ids of a run, all held."""
    lengths: Int[Array, " R"]
    """Tokens of a run, whole blocks; 0 for a run that is none. No member writes into it in this step."""
    run: Int[Array, " S"]
    """Which run a sequence's block table begins with; `R` for none. Members have one new row."""


class StepInputs(NamedTuple):
    """`T` token rows of `S` sequences, sequence after sequence; `W` blocks a sequence at most; `N` tiles.

    Row ranges: sequence `s` owns rows `query_start[s]:query_start[s + 1]`. Padding sequences own no row and have
    `seq_lens` 0; padding rows come last and have `PAD_SLOT`. A block table entry that is not held is 0.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    slot_mapping: Int[Array, " T"]
    """Where the row's K and V go: `block_id * block_size + offset`."""
    block_tables: Int[Array, "S W"]
    seq_lens: Int[Array, " S"]
    """Positions held once the step is done: computed before plus the new rows."""
    query_start: Int[Array, " S+1"]
    logits_rows: Int[Array, " S"]
    """The row whose output predicts the sequence's next token."""
    tiles: Tiles
    shared: SharedRuns | None = None


def make_tiles(query_start: np.ndarray, seq_lens: np.ndarray, tile_size: int, capacity: int) -> Tiles:
    """The tiles of a step, on the host, padded to `capacity`.

    `query_start` int32 [S + 1], `seq_lens` int32 [S]. `num_rows // tile_size + S` is always capacity enough.
    """
    query_lens = np.diff(query_start)
    counts = np.where(query_lens > 1, -(-query_lens // tile_size), 0)
    total = int(counts.sum())
    if total > capacity:
        raise ValueError(f"{total} tiles of {tile_size} rows do not fit in {capacity}")
    seq = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    nth = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32)
    offset = nth * tile_size
    context = (seq_lens - query_lens).astype(np.int32)[seq]
    rows = np.minimum(query_lens[seq] - offset, tile_size)
    fields = (seq, query_start[seq] + offset, context + offset, context + offset + rows)
    padded = np.zeros((4, capacity), np.int32)
    padded[:, :total] = fields
    arrays: list[Any] = list(padded)
    return Tiles(*arrays)

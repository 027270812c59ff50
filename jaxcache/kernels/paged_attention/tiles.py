"""Tiles as kernels take them: decodes found, and the host's tiles cut to a size that suits the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxcache.kernels.step import SharedRuns, StepInputs, Tiles


class RunTiles(NamedTuple):
    """Members of shared runs side by side, `Q` of one run to a tile at most; `M` tiles for `D` decodes."""

    run: Int[Array, " M"]
    kv_end: Int[Array, " M"]
    """The run's length; 0 for padding tiles, which come last."""
    members: Int[Array, "M Q"]
    """Decodes, any one where there is none."""
    place: Int[Array, " D"]
    """Where a decode is among all members, tile after tile; `M * Q` for one that shares nothing."""


def find_decodes(step: StepInputs) -> tuple[Tiles, Int[Array, ""]]:
    """The sequences with one new row as tiles of one row, the real ones first, and how many they are."""
    sequences = jnp.arange(step.seq_lens.shape[0], dtype=jnp.int32)
    single = jnp.diff(step.query_start) == 1
    count = jnp.sum(single, dtype=jnp.int32)
    place = jnp.where(single, jnp.cumsum(single) - 1, sequences.shape[0])
    seq = jnp.zeros_like(sequences).at[place].set(sequences, mode="drop")
    kv_end = jnp.where(sequences < count, step.seq_lens[seq], 0)
    return Tiles(seq, step.query_start[seq], kv_end - 1, kv_end), count


def cut_tiles(tiles: Tiles, size: int, rows: int) -> Tiles:
    """`tiles`, however long the host made them, in pieces of at most `size` rows; `rows` in all at most."""
    lengths = jnp.where(tiles.kv_end > 0, tiles.kv_end - tiles.pos, 0)
    pieces = -(-lengths // size)
    ends = jnp.cumsum(pieces)
    nth = jnp.arange(rows // size + tiles.seq.shape[0], dtype=jnp.int32)
    of = jnp.minimum(jnp.searchsorted(ends, nth, side="right"), tiles.seq.shape[0] - 1)
    skipped = (nth - ends[of] + pieces[of]) * size
    pos = tiles.pos[of] + skipped
    kv_end = jnp.where(nth < ends[-1], jnp.minimum(pos + size, tiles.kv_end[of]), 0)
    return Tiles(tiles.seq[of], tiles.row[of] + skipped, pos, kv_end)


def cut_runs(shared: SharedRuns, run: Int[Array, " D"], size: int) -> RunTiles:
    """Tiles of `size` members. `run`: that of each decode, `R` for none."""
    decodes, runs = run.shape[0], shared.lengths.shape[0]
    inside = (run[:, None] == jnp.arange(runs, dtype=jnp.int32)[None]) & (shared.lengths > 0)[None]
    nth_member = jnp.cumsum(inside, axis=0)
    pieces = -(-nth_member[-1] // size)
    ends = jnp.cumsum(pieces)
    tiles = jnp.arange(decodes // size + runs, dtype=jnp.int32)
    of = jnp.minimum(jnp.searchsorted(ends, tiles, side="right"), runs - 1)
    places = ((ends - pieces) * size)[None] + nth_member - 1
    place = jnp.min(jnp.where(inside, places, tiles.shape[0] * size), axis=1)
    members = jnp.zeros(tiles.shape[0] * size, jnp.int32).at[place].set(jnp.arange(decodes), mode="drop")
    return RunTiles(of, jnp.where(tiles < ends[-1], shared.lengths[of], 0), members.reshape(-1, size), place)

"""Tiles as kernels take them: decodes found, and the host's tiles cut to a size that suits the device."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxcache.kernels.step import StepInputs, Tiles


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

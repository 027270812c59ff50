"""int8 KV: the scales of a chunk, from one row per block to one row per head.

Scores and weights are scaled, not K and V: a scale per key multiplies a column of the scores, far less work than
the 128 lanes of the key. So each head needs its scales along the lanes, token by token, while memory holds a row
per block, `[head, K or V, slot]` along the lanes. With blocks of 16 slots, 8 blocks (sublanes) times 8 groups of
16 lanes are transposed as an 8 x 8 matrix whose entries are 16 lanes wide.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128


@dataclass(frozen=True)
class ChunkScales:
    """Scales `[1, tokens]` by head, counted from the first one loaded: `keys(0)`, `values(0)`, ..."""

    parts: list[jax.Array]
    """`[blocks, max(LANES, block_size)]` each: blocks in groups that fill the lanes, one group per row and
    head."""
    block_size: int

    @staticmethod
    def load(ref: Any, block_size: int, start: Any, heads: int) -> "ChunkScales":
        """Of `heads` heads from `start` on; `ref` [blocks, 1, H * 2 * block_size]. `start` is 0 or makes whole
        lanes."""
        width, per_head = max(LANES, block_size), 2 * block_size
        at = start * per_head if isinstance(start, int) else pl.multiple_of(start * per_head, LANES)
        rows = ref[:, 0, pl.ds(at, heads * per_head)]
        short = -rows.shape[1] % width
        if short:
            rows = jnp.concatenate([rows, jnp.zeros((rows.shape[0], short), rows.dtype)], axis=1)
        parts = [rows[:, start : start + width] for start in range(0, rows.shape[1], width)]
        return ChunkScales([transpose_groups(part, block_size) for part in parts], block_size)

    def keys(self, head: int) -> jax.Array:
        return self._row(2 * head)

    def values(self, head: int) -> jax.Array:
        return self._row(2 * head + 1)

    def _row(self, index: int) -> jax.Array:
        group = max(1, LANES // self.block_size)
        part, first = self.parts[index // group], index % group
        return jnp.concatenate([part[i : i + 1] for i in range(first, part.shape[0], group)], axis=1)


def transpose_groups(x: jax.Array, width: int) -> jax.Array:
    """Swap rows and groups of `width` lanes within each `n` rows of `x` [m * n, n * width], by halves, quarters,
    ..."""
    groups = x.shape[1] // width
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    group = lax.broadcasted_iota(jnp.int32, x.shape, 1) // width
    distance = 1
    while distance < groups:
        low_row, low_group = row & distance == 0, group & distance == 0
        below = _roll(_roll(x, -distance, 0), distance * width, 1)
        above = _roll(_roll(x, distance, 0), -distance * width, 1)
        x = jnp.where(low_row == low_group, x, jnp.where(low_row, below, above))
        distance *= 2
    return x


def _roll(x: jax.Array, by: int, axis: int) -> jax.Array:
    return pltpu.roll(x, by % x.shape[axis], axis)

"""Random steps for checks and measurements: lengths in, block tables and arrays out."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcache.kernels.kv_write import write_kv
from jaxcache.kernels.layout import KVCache, KVLayout, init_kv
from jaxcache.kernels.paged_attention.shapes import AttentionShape
from jaxcache.kernels.step import SharedRuns, StepInputs, Tiles, make_tiles

TILE_SIZE = 128


@dataclass(frozen=True)
class Problem:
    """A step of sequences of `lengths` (computed before, new rows), in shuffled blocks of `block_size` tokens."""

    shape: AttentionShape
    lengths: tuple[tuple[int, int], ...]
    dtype: str = "bfloat16"
    """Of q and of new K and V."""
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    layers: int = 1
    common: int = 0
    """Leading tokens that all sequences have, in the same whole blocks. The decodes are told of that run."""

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.shape.kv_heads, self.shape.head_dim, self.block_size)

    @property
    def rows(self) -> int:
        return sum(new for _, new in self.lengths)

    @property
    def keys(self) -> int:
        """Keys that a row sees, summed over the rows."""
        window = self.shape.sliding_window
        positions = np.concatenate([before + np.arange(new) for before, new in self.lengths])
        return int(np.sum(positions + 1 if window is None else np.minimum(positions + 1, window)))

    @property
    def options(self) -> dict:
        """Of attention, the sinks apart."""
        return {"sliding_window": self.shape.sliding_window}

    @functools.cached_property
    def blocks(self) -> list[np.ndarray]:
        """Block ids of each sequence; 0, the null block, belongs to nobody."""
        counts = [-(-(before + new) // self.block_size) for before, new in self.lengths]
        ids = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32) + 1
        blocks = np.split(ids, np.cumsum(counts)[:-1])
        for own in blocks:
            own[: self.common // self.block_size] = blocks[0][: self.common // self.block_size]
        return blocks

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.blocks)) + 1

    def slots(self, *, new: bool) -> Int[Array, " T"]:
        """Of the new rows, or of the positions before them, each once."""
        parts = []
        for nth, ((before, rows), blocks) in enumerate(zip(self.lengths, self.blocks)):
            at = np.arange(before, before + rows) if new else np.arange(self.common if nth else 0, before)
            parts.append(blocks[at // self.block_size] * self.block_size + at % self.block_size)
        return jnp.asarray(np.concatenate(parts), jnp.int32)

    def step(self) -> StepInputs:
        """What the device is told of the step."""
        tables = np.zeros((len(self.lengths), max(map(len, self.blocks))), np.int32)
        for row, blocks in zip(tables, self.blocks):
            row[: len(blocks)] = blocks
        new = np.array([rows for _, rows in self.lengths])
        start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        lens = np.array([sum(pair) for pair in self.lengths], np.int32)
        positions = np.concatenate([before + np.arange(rows) for before, rows in self.lengths])
        tiles = make_tiles(start, lens, TILE_SIZE, int(np.sum(-(-new // TILE_SIZE) * (new > 1))))
        ints = functools.partial(jnp.asarray, dtype=jnp.int32)
        return StepInputs(
            token_ids=ints(np.zeros(self.rows)),
            positions=ints(positions),
            slot_mapping=self.slots(new=True),
            block_tables=ints(tables),
            seq_lens=ints(lens),
            query_start=ints(start),
            logits_rows=ints(start[1:] - 1),
            tiles=Tiles(*(ints(field) for field in tiles)),
            shared=self._shared(tables, new) if self.common else None,
        )

    def _shared(self, tables: np.ndarray, new: np.ndarray) -> SharedRuns:
        ints = functools.partial(jnp.asarray, dtype=jnp.int32)
        return SharedRuns(ints(tables[:1]), ints([self.common]), ints(np.where(new == 1, 0, 1)))

    def arrays(self, rows: int, heads: int, seed: int) -> Float[Array, "T N D"]:
        """Standard normal."""
        shape = (rows, heads, self.shape.head_dim)
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(self.dtype)

    def queries(self) -> Float[Array, "T N D"]:
        return self.arrays(self.rows, self.shape.heads, 0)

    def new_kv(self) -> tuple[Float[Array, "T H D"], Float[Array, "T H D"]]:
        return self.arrays(self.rows, self.shape.kv_heads, 1), self.arrays(self.rows, self.shape.kv_heads, 2)

    def sinks(self) -> Float[Array, " N"] | None:
        return jnp.linspace(-2.0, 3.0, self.shape.heads) if self.shape.sinks else None

    def written_kv(self) -> KVCache:
        """The positions before the new rows in layer 0; every other slot is NaN (int8: its scales are)."""
        kv = init_kv(self.layout, self.layers, self.num_blocks, self.kv_dtype)
        if kv.scales is not None:
            kv = KVCache(kv.data, jnp.full_like(kv.scales, jnp.nan))
        else:
            kv = KVCache(jnp.full_like(kv.data, jnp.nan))
        slots = self.slots(new=False)
        k, v = (self.arrays(slots.shape[0], self.shape.kv_heads, seed) for seed in (3, 4))
        return write_kv(kv, 0, k, v, slots, implementation="reference")

    def random_kv(self) -> KVCache:
        """Every slot of every layer full, made on the device: for measurements, which are larger."""

        @jax.jit
        def make() -> KVCache:
            kv = init_kv(self.layout, self.layers, self.num_blocks, self.kv_dtype)
            if kv.scales is not None:
                data = jax.random.randint(jax.random.key(0), kv.data.shape, -127, 127, jnp.int8)
                return KVCache(data, jnp.full_like(kv.scales, 0.01))
            return KVCache(jax.random.normal(jax.random.key(0), kv.data.shape, jnp.bfloat16).astype(self.kv_dtype))

        return make()

"""Random paged scenes for the kernel tests, and dense attention in numpy that knows nothing of blocks.

A scene writes each sequence's KV into shuffled blocks, in descending order and partly shared, poisons everything
that nobody may read with NaN, and asks for the outputs of the new rows.
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxcache.kernels import PAD_SLOT, KVCache, KVLayout, StepInputs, init_kv, make_tiles
from jaxcache.kernels.kv_write import write_kv
from jaxcache.kernels.step import SharedRuns

LAYERS = 2
LAYER = 1


@dataclass
class Scene:
    """`lengths` are `(computed before, new rows)` per sequence."""

    lengths: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"
    kv_dtype: str = "float32"
    shared_blocks: int = 0
    """Leading blocks that all sequences have in common."""
    unheld: dict[int, int] = field(default_factory=dict)
    """Leading blocks of a sequence that it no longer holds (sliding window)."""
    padding: tuple[int, int, int] = (0, 0, 0)
    """Padding rows, sequences and tiles."""
    tile_size: int = 128
    spare_blocks: int = 5
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        totals = [before + new for before, new in self.lengths]
        counts = [-(-total // self.block_size) for total in totals]
        num_blocks = 1 + sum(counts) + self.spare_blocks
        # Descending over the array, interleaved between the sequences: no run of blocks is contiguous.
        free = list(range(1, num_blocks))
        prefix = [free.pop() for _ in range(self.shared_blocks)]
        own: list[list[int]] = [list(prefix) for _ in totals]
        while any(len(blocks) < count for blocks, count in zip(own, counts)):
            for blocks, count in zip(own, counts):
                if len(blocks) < count:
                    blocks.append(free.pop())
        self.blocks = own
        self.unused = free

        shape = (max(totals), self.kv_heads, self.head_dim)
        common = rng.standard_normal((2, *shape)).astype(np.float32)
        shared = self.shared_blocks * self.block_size
        self.kv_rows = []
        for total in totals:
            rows = rng.standard_normal((2, *shape)).astype(np.float32)[:, :total]
            rows[:, :shared] = common[:, :shared][:, :total]
            self.kv_rows.append(rows)
        new_rows = sum(new for _, new in self.lengths)
        pad_rows, pad_seqs, pad_tiles = self.padding
        self.q = rng.standard_normal((new_rows + pad_rows, self.heads, self.head_dim)).astype(np.float32)
        self.num_blocks = num_blocks
        self.num_rows = new_rows
        self.step = self._step(pad_rows, pad_seqs, pad_tiles)

    def _step(self, pad_rows: int, pad_seqs: int, pad_tiles: int) -> StepInputs:
        width = max(len(blocks) for blocks in self.blocks) + 1
        tables = np.zeros((len(self.lengths) + pad_seqs, width), np.int32)
        positions, slots = [], []
        for row, ((before, new), blocks) in enumerate(zip(self.lengths, self.blocks)):
            tables[row, : len(blocks)] = blocks
            tables[row, : self.unheld.get(row, 0)] = 0
            at = np.arange(before, before + new)
            positions.append(at)
            slots.append(np.array(blocks)[at // self.block_size] * self.block_size + at % self.block_size)
        new = np.array([new for _, new in self.lengths] + [0] * pad_seqs)
        query_start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        seq_lens = np.array([sum(pair) for pair in self.lengths] + [0] * pad_seqs, np.int32)
        rows = self.num_rows + pad_rows
        prefill = [-(-n // self.tile_size) for n in new.tolist() if n > 1]
        tiles = make_tiles(query_start, seq_lens, self.tile_size, sum(prefill) + pad_tiles)
        fill = np.zeros(pad_rows, np.int32)
        step = StepInputs(
            token_ids=np.zeros(rows, np.int32),
            positions=np.concatenate([*positions, fill]).astype(np.int32),
            slot_mapping=np.concatenate([*slots, fill + PAD_SLOT]).astype(np.int32),
            block_tables=tables,
            seq_lens=seq_lens,
            query_start=query_start,
            logits_rows=np.maximum(query_start[1:] - 1, 0),
            tiles=tiles,
        )
        return jax.tree.map(jnp.asarray, step)

    def share(self, runs: list[tuple[int, list[int]]]) -> None:
        """Tell the step of runs of `(blocks, members)`; one more that is none."""
        tables = np.asarray(self.step.block_tables)
        shared = SharedRuns(
            np.zeros((len(runs) + 1, tables.shape[1]), np.int32),
            np.zeros(len(runs) + 1, np.int32),
            np.full(len(tables), len(runs) + 1, np.int32),
        )
        for nth, (blocks, members) in enumerate(runs):
            shared.tables[nth, :blocks] = tables[members[0], :blocks]
            shared.lengths[nth] = blocks * self.block_size
            shared.run[members] = nth
        self.step = self.step._replace(shared=jax.tree.map(jnp.asarray, shared))

    def empty_kv(self) -> KVCache:
        """Every slot NaN (int8: NaN scales), the null block and the other layers included."""
        layout = KVLayout(self.kv_heads, self.head_dim, self.block_size)
        kv = init_kv(layout, LAYERS, self.num_blocks, jnp.dtype(self.kv_dtype))
        if kv.scales is not None:
            return KVCache(kv.data, jnp.full_like(kv.scales, jnp.nan))
        return KVCache(jnp.full_like(kv.data, jnp.nan))

    def full_kv(self, implementation: str | None = None) -> KVCache:
        """KV of all positions of all sequences, but for the blocks that nobody holds any more."""
        k, v, slots = [], [], []
        for row, blocks in enumerate(self.blocks):
            first = self.unheld.get(row, 0) * self.block_size
            at = np.arange(first, sum(self.lengths[row]))
            slots.append(np.array(blocks)[at // self.block_size] * self.block_size + at % self.block_size)
            k.append(self.kv_rows[row][0, first:])
            v.append(self.kv_rows[row][1, first:])
        slots, unique = np.unique(np.concatenate(slots), return_index=True)
        k, v = (jnp.asarray(np.concatenate(rows)[unique], jnp.dtype(self.dtype)) for rows in (k, v))
        slots = jnp.asarray(slots, jnp.int32)
        write = jax.jit(functools.partial(write_kv, layer=LAYER, implementation=implementation))
        return write(self.empty_kv(), k=k, v=v, slot_mapping=slots)

    def dense(self, *, sm_scale=None, sliding_window=None, soft_cap=None, sinks=None) -> np.ndarray:
        """The outputs of the real rows in float64, from the rows themselves."""
        out, row = [], 0
        for (before, new), (k, v) in zip(self.lengths, self.kv_rows):
            for position in range(before, before + new):
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                out.append(
                    _dense_row(
                        self.q[row], k[first : position + 1], v[first : position + 1], sm_scale, soft_cap, sinks
                    )
                )
                row += 1
        return np.stack(out)

    def queries(self) -> Array:
        return jnp.asarray(self.q, jnp.dtype(self.dtype))


def _dense_row(q: np.ndarray, k: np.ndarray, v: np.ndarray, sm_scale, soft_cap, sinks) -> np.ndarray:
    heads, head_dim = q.shape
    out = np.zeros((heads, head_dim))
    for head in range(heads):
        of = head // (heads // k.shape[1])
        scores = k[:, of].astype(np.float64) @ q[head] * (sm_scale or head_dim**-0.5)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[head]) - scores.max()))
        out[head] = weights / total @ v[:, of]
    return out

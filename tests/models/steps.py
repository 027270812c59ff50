"""Step inputs for one or several sequences without the engine, and a model run over given chunks."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.kernels import PAD_SLOT, KVCache, KVLayout, StepInputs, init_kv, make_tiles
from jaxcache.models.config import ModelConfig

BLOCK_SIZE = 16
TILE_SIZE = 32


def one_step(chunks: Sequence[tuple[np.ndarray, int, Sequence[int]]], padding: int = 0) -> StepInputs:
    """`chunks`: `(token ids, tokens computed before, block ids)` each; `padding` adds rows and a sequence."""
    lengths = [len(tokens) for tokens, _, _ in chunks]
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    seq_lens = np.array([before + n for (_, before, _), n in zip(chunks, lengths)], np.int32)
    tables = np.zeros((len(chunks) + bool(padding), max(len(blocks) for _, _, blocks in chunks)), np.int32)
    positions = [before + np.arange(n) for (_, before, _), n in zip(chunks, lengths)]
    slots = []
    for row, ((_, _, blocks), at) in enumerate(zip(chunks, positions)):
        tables[row, : len(blocks)] = blocks
        slots.append(np.asarray(blocks)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
    if padding:
        query_start, seq_lens = np.append(query_start, query_start[-1]), np.append(seq_lens, 0)
    count = sum(-(-n // TILE_SIZE) for n in lengths if n > 1) + bool(padding)
    tiles = make_tiles(query_start, seq_lens, TILE_SIZE, count)
    fill = np.zeros(padding, np.int32)
    step = StepInputs(
        np.concatenate([*(tokens for tokens, _, _ in chunks), fill]),
        np.concatenate([*positions, fill]),
        np.concatenate([*slots, fill + PAD_SLOT]),
        tables,
        seq_lens,
        query_start,
        np.maximum(query_start[1:] - 1, 0),
        tiles,
    )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), step)


def kv_for(config: ModelConfig, num_blocks: int, dtype: str = "float32") -> KVCache:
    layout = KVLayout(config.num_kv_heads, config.head_dim, BLOCK_SIZE)
    return init_kv(layout, config.num_layers, num_blocks, jnp.dtype(dtype))


class Runner:
    """A jitted model, which keeps its KV from call to call."""

    def __init__(self, model, num_blocks: int, kv_dtype: str = "float32", implementation: str | None = None):
        graph, self.params = nnx.split(model)
        self.kv = kv_for(model.config, num_blocks, kv_dtype)

        def forward(params, kv, step):
            model = nnx.merge(graph, params)
            hidden, kv = model(step, kv, implementation)
            return model.logits(hidden), kv

        self.forward = jax.jit(forward, donate_argnames="kv")

    def __call__(self, step: StepInputs) -> np.ndarray:
        logits, self.kv = self.forward(self.params, self.kv, step)
        return np.asarray(logits)

"""Step inputs for one or several sequences without the engine, and a model run over given chunks."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.kernels import PAD_SLOT, KVCache, KVLayout, StepInputs, init_kv, make_tiles
from jaxcache.models.config import ModelConfig
from jaxcache.models.recurrent import HybridCache, init_state

BLOCK_SIZE = 16
TILE_SIZE = 32


Chunk = tuple[np.ndarray, int, Sequence[int]]
"""Token ids, tokens computed before, block ids."""


def one_step(
    chunks: Sequence[Chunk],
    padding: int = 0,
    block_size: int = BLOCK_SIZE,
    width: int | None = None,
    num_tiles: int | None = None,
) -> StepInputs:
    """`padding` adds rows and a sequence; `width` is that of the block tables."""
    lengths = [len(tokens) for tokens, _, _ in chunks]
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    seq_lens = np.array([before + n for (_, before, _), n in zip(chunks, lengths)], np.int32)
    width = width or max(len(blocks) for _, _, blocks in chunks)
    tables = np.zeros((len(chunks) + bool(padding), width), np.int32)
    positions = [before + np.arange(n) for (_, before, _), n in zip(chunks, lengths)]
    slots = []
    for row, ((_, _, blocks), at) in enumerate(zip(chunks, positions)):
        tables[row, : len(blocks)] = blocks
        slots.append(np.asarray(blocks)[at // block_size] * block_size + at % block_size)
    if padding:
        query_start, seq_lens = np.append(query_start, query_start[-1]), np.append(seq_lens, 0)
    if num_tiles is None:
        num_tiles = sum(-(-n // TILE_SIZE) for n in lengths if n > 1) + bool(padding)
    tiles = make_tiles(query_start, seq_lens, TILE_SIZE, num_tiles)
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


def kv_for(
    config: ModelConfig, num_blocks: int, dtype: str = "float32", block_size: int = BLOCK_SIZE
) -> KVCache | HybridCache:
    layout = KVLayout(config.num_kv_heads, config.head_dim, block_size)
    kv = init_kv(layout, config.kv_layers, num_blocks, jnp.dtype(dtype))
    if config.recurrent is None:
        return kv
    return HybridCache(kv, init_state(config, num_blocks, jnp.float32))


class Runner:
    """A jitted model, which keeps its KV from call to call."""

    def __init__(
        self,
        model,
        num_blocks: int,
        kv_dtype: str = "float32",
        implementation: str | None = None,
        block_size: int = BLOCK_SIZE,
    ):
        graph, self.params = nnx.split(model)
        self.kv = kv_for(model.config, num_blocks, kv_dtype, block_size)

        def forward(params, kv, step):
            model = nnx.merge(graph, params)
            hidden, kv = model(step, kv, implementation)
            return model.logits(hidden), kv

        self.forward = jax.jit(forward, donate_argnames="kv")

    def __call__(self, step: StepInputs | tuple[StepInputs, ...]) -> np.ndarray:
        logits, self.kv = self.forward(self.params, self.kv, step)
        return np.asarray(logits)

"""Many pool sizes at once: the pool's transitions under `vmap`, a lane per size, a whole trace in one jitted scan.

The index is two arrays here (content to block, block to content), since a trace's contents are known beforehand.
Hits are those of `replay`, but for one thing: of a content that stands in two blocks, as when a prompt of nothing
but whole, cached blocks has its last one computed again, the newer one is found. (s3fifo's table of ghosts has the
size that the largest pool needs, so that which of them collide, and with that a few hits, depends on it.)
"""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxcache.core import pool, pool_s3fifo
from jaxcache.replay.trace import Trace, chains

_POLICIES: dict[str, ModuleType] = {"lru": pool, "s3fifo": pool_s3fifo}
_GOLDEN = 2_654_435_769
"""2**32 over the golden ratio: spreads consecutive ids over 32 bits (Knuth, TAOCP 6.4)."""


class _Prompts(NamedTuple):
    """`R` requests of at most `W` blocks."""

    contents: Int[Array, "R W"]
    """By full block; padded with the number of contents."""
    num_full: Int[Array, " R"]
    num_findable: Int[Array, " R"]
    num_blocks: Int[Array, " R"]


class _Lane(NamedTuple):
    pool: pool.PoolState | pool_s3fifo.S3PoolState
    block_of: Int[Array, " U"]
    """The block that holds each content; 0 for none."""
    content_of: Int[Array, " N"]


def sweep(trace: Trace, *, block_size: int, num_blocks: Sequence[int], policy: str = "lru") -> list[int]:
    """Hit tokens for each pool size in `num_blocks` (the null block included)."""
    prompts, num_contents = _prompts(trace, block_size)
    most = int(prompts.num_blocks.max())
    if min(num_blocks) - 1 < most:
        raise ValueError(
            f"the longest prompt needs {most} blocks: num_blocks must be more than that, got {num_blocks}"
        )
    largest = max(num_blocks)
    chunk = max(1, 3 * largest // (prompts.contents.shape[1] + 2))
    chunks = jax.tree.map(lambda x: _chunked(x, chunk, num_contents), prompts)
    usable = jnp.asarray(num_blocks, jnp.int32) - 1
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        hits = _sweep(chunks, usable, policy, largest, num_contents)
    return [int(n) * block_size for n in hits]


@partial(jax.jit, static_argnums=(2, 3, 4))
def _sweep(chunks: _Prompts, usable: Int[Array, " lanes"], policy: str, num_blocks: int, num_contents: int):
    rules = _POLICIES[policy]

    def lane(n):
        state = _Lane(
            rules.init(num_blocks, n),
            jnp.zeros(num_contents + 1, jnp.int32),
            jnp.full(num_blocks, num_contents, jnp.int32),
        )

        def run_chunk(state, prompts):
            """Rings are squeezed once a chunk, which leaves room for all of it."""
            state = state._replace(pool=rules.compact(state.pool))
            return lax.scan(partial(_admit, rules), state, prompts)

        _, hits = lax.scan(run_chunk, state, chunks)
        return jnp.sum(hits)

    return jax.vmap(lane)(usable)


def _admit(rules: ModuleType, state: _Lane, prompt: _Prompts) -> tuple[_Lane, Int[Array, ""]]:
    """One request: hit, allocate, name, release. Returns the blocks that it hit."""
    width = prompt.contents.shape[0]
    nth = jnp.arange(width, dtype=jnp.int32)
    nobody = state.content_of.shape[0]
    nothing = state.block_of.shape[0] - 1

    found = state.block_of[prompt.contents]
    hit = jnp.sum(jnp.cumprod((found > 0) & (nth < prompt.num_findable), dtype=jnp.int32), dtype=jnp.int32)
    hits = jnp.where(nth < hit, found, nobody)
    pool_state, new, _ = rules.acquire(state.pool, hits, prompt.num_blocks - hit, capacity=width + 1)

    lost = state.content_of.at[new].get(mode="fill", fill_value=nothing)
    current = state.block_of[lost] == new
    block_of = state.block_of.at[jnp.where(current, lost, nothing + 1)].set(0, mode="drop")

    position = jnp.arange(width + 1, dtype=jnp.int32) + hit
    full = position < prompt.num_full
    named = jnp.where(full, new, nobody)
    content = jnp.where(full, prompt.contents[jnp.minimum(position, width - 1)], nothing)
    content_of = state.content_of.at[new].set(content, mode="drop")
    block_of = block_of.at[jnp.where(full, content, nothing + 1)].set(named, mode="drop")

    fingerprints = content.astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    extra = (fingerprints,) if rules is pool_s3fifo else ()
    pool_state = rules.name(pool_state, named, *extra)
    pool_state = rules.give_back(pool_state, jnp.concatenate([hits, new])[::-1])
    return _Lane(pool_state, block_of, content_of), hit


def _prompts(trace: Trace, block_size: int) -> tuple[_Prompts, int]:
    """The trace as arrays, contents numbered from 0, and how many there are."""
    lists = chains(trace, block_size)
    lengths = np.array([request.input_length for request in trace.requests])
    full = np.array([len(chain) for chain in lists], np.int32)
    known, dense = np.unique(np.concatenate([np.asarray(chain, np.int64) for chain in lists]), return_inverse=True)
    contents = np.full((len(lists), max(1, int(full.max()))), len(known), np.int32)
    contents[np.arange(contents.shape[1]) < full[:, None]] = dense
    findable = np.minimum(full, (lengths - 1) // block_size).astype(np.int32)
    return _Prompts(contents, full, findable, -(-lengths // block_size).astype(np.int32)), len(known)  # pyright: ignore


def _chunked(values: np.ndarray, size: int, padding: int) -> Int[Array, "chunks size ..."]:
    """Cut into chunks; requests of no blocks fill the last one."""
    missing = -len(values) % size
    fill = padding if values.ndim == 2 else 0
    padded = np.concatenate([values, np.full((missing, *values.shape[1:]), fill, values.dtype)])
    return jnp.asarray(padded.reshape(-1, size, *values.shape[1:]))

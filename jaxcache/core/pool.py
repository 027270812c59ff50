"""The block pool: arrays moved by pure transitions.

Which blocks are free, in which order they are used again, and how often each is held. The order is that of the
reference: blocks without a name first (they hold nothing anybody could ask for), then the least recently
released; of one released chain, its deepest block first.

The eviction queue is a ring of block ids. An entry counts only while its block says that it is there (`place`);
taking a block out of the middle of the queue just makes it forget, which leaves a stale entry behind. `allocate`
skips stale entries; `release` squeezes them out when the ring is full. So every transition costs O(ids), not
O(pool), apart from one `compact` in at least `num_blocks` releases.

All transitions work under `jit`, `scan`, `vmap` and `eval_shape`. Id vectors are padded with any id outside
`[0, num_blocks)`; padding is dropped. The ids of one call are distinct. Donating the state makes them in-place.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

NULL_BLOCK = 0
"""Stands for "no block here" in block tables: never free, named, written or evicted."""

NOWHERE = -1
"""The place of a block that was taken out of the middle of the queue."""


class PoolState(NamedTuple):
    """`N` blocks, a ring of `C` entries (a power of two, at least `4 * N`)."""

    ref_count: Int[Array, "*batch N"]
    """How many sequences hold the block."""
    named: Bool[Array, "*batch N"]
    """Whether the block's content can be found by others."""
    place: Int[Array, "*batch N"]
    """Of a queued block, the index of its entry in `ring`; of a held one, `NOWHERE` or where it last was."""
    ring: Int[Array, "*batch C"]
    cursor: Int[Array, "*batch 3"]
    """Head and tail of the queue, masked to index the ring (`acquire` keeps the head below `C`); free blocks."""

    @property
    def num_blocks(self) -> int:
        return self.ref_count.shape[-1]

    @property
    def num_free(self) -> Int[Array, "*batch"]:
        """Blocks that nobody holds, named ones included."""
        return self.cursor[..., 2]


def check_size(num_blocks: int) -> None:
    """A `ValueError` unless a pool can have so many blocks."""
    if not isinstance(num_blocks, int | np.integer) or isinstance(num_blocks, bool) or num_blocks < 2:
        raise ValueError(
            f"a pool needs at least 2 blocks, since block 0 is the null block; got num_blocks={num_blocks!r}"
        )


def init(num_blocks: int, num_usable: int | Int[Array, ""] | None = None) -> PoolState:
    """A pool of `num_blocks` blocks, block 0 being the null block: `num_blocks - 1` are free, lowest id first.

    `num_usable`: only so many are ever handed out, so that pools of different sizes have arrays of one shape.
    """
    check_size(num_blocks)
    capacity = 1 << (4 * int(num_blocks) - 1).bit_length()
    free = jnp.asarray(num_blocks - 1 if num_usable is None else num_usable, jnp.int32)
    return PoolState(
        ref_count=jnp.zeros(num_blocks, jnp.int32),
        named=jnp.zeros(num_blocks, jnp.bool_),
        place=jnp.arange(-1, num_blocks - 1, dtype=jnp.int32),
        ring=jnp.zeros(capacity, jnp.int32).at[: num_blocks - 1].set(jnp.arange(1, num_blocks, dtype=jnp.int32)),
        cursor=jnp.stack([jnp.zeros((), jnp.int32), free, free]),
    )


def allocate(
    pool: PoolState, n: Int[Array, ""] | int, *, capacity: int
) -> tuple[PoolState, Int[Array, " capacity"], Bool[Array, ""]]:
    """Take the `n` next blocks of the queue; they lose their names and are held once.

    Returns the pool, the ids (padded with `num_blocks`), and whether there were enough; if not (or if
    `n > capacity`) the pool is unchanged and all ids are padding.
    """
    return acquire(pool, jnp.zeros(0, jnp.int32), n, capacity=capacity)


def touch(pool: PoolState, ids: Int[Array, " K"]) -> PoolState:
    """Hold `ids` once more; those that were free leave the queue."""
    return acquire(pool, ids, 0, capacity=0)[0]


def acquire(
    pool: PoolState,
    hits: Int[Array, " K"],
    n: Int[Array, ""] | int,
    headroom: Int[Array, ""] | int = 0,
    *,
    capacity: int,
) -> tuple[PoolState, Int[Array, " capacity"], Bool[Array, ""]]:
    """Touch `hits`, then allocate `n` blocks: all or nothing.

    It succeeds when the hits that are free, the `n` new blocks and `headroom` more are free together.
    """
    num_blocks = pool.num_blocks
    n, headroom = jnp.asarray(n, jnp.int32), jnp.asarray(headroom, jnp.int32)
    hits = jnp.asarray(hits, jnp.int32)
    head, tail, num_free = pool.cursor[0], pool.cursor[1], pool.cursor[2]

    real = (hits >= 0) & (hits < num_blocks) & (hits != NULL_BLOCK)
    was_free = real & (pool.ref_count.at[hits].get(mode="fill", fill_value=1) == 0)
    num_revived = jnp.sum(was_free, dtype=jnp.int32)
    ok = (n >= 0) & (n <= capacity) & (num_revived + n + headroom <= num_free)
    n = jnp.where(ok, n, 0)

    place = pool.place.at[jnp.where(ok & was_free, hits, num_blocks)].set(NOWHERE, mode="drop")
    new_ids, head = _take(pool.ring, place, head, tail, n, capacity)
    whole_turns = head & ~(pool.ring.shape[-1] - 1)
    head, tail = head - whole_turns, tail - whole_turns
    held = jnp.concatenate([jnp.where(ok & real, hits, num_blocks), new_ids])
    pool = pool._replace(
        ref_count=pool.ref_count.at[held].add(1, mode="drop"),
        named=pool.named.at[new_ids].set(False, mode="drop"),
        place=place,
        cursor=jnp.stack([head, tail, num_free - jnp.where(ok, num_revived, 0) - n]),
    )
    return pool, new_ids, ok


def _take(ring, place, head, tail, n, capacity):
    """The first `n` ids of the queue that are not stale, and the head after them."""
    if capacity == 0:
        return jnp.zeros(0, jnp.int32), head
    mask = ring.shape[-1] - 1
    window = jnp.arange(capacity + capacity // 2 + 8, dtype=jnp.int32)

    def more(carry):
        return carry[1] < n

    def take_window(carry):
        position, found, ids, _ = carry
        at = position + window
        entry = ring[at & mask]
        counts = (place[entry] == at & mask) & (at < tail)
        nth = found + jnp.cumsum(counts, dtype=jnp.int32)
        taken = counts & (nth <= n)
        ids = ids.at[jnp.where(taken, nth - 1, capacity)].set(entry, mode="drop")
        after = jnp.max(jnp.where(taken, at + 1, position))
        return position + window.shape[0], jnp.minimum(nth[-1], n), ids, after

    padding = jnp.full(capacity, place.shape[-1], jnp.int32)
    _, _, ids, head = lax.while_loop(more, take_window, (head, jnp.zeros((), jnp.int32), padding, head))
    return ids, head


def release(pool: PoolState, ids: Int[Array, " K"], first: Bool[Array, ""] | bool = False) -> PoolState:
    """Let go of `ids`, in this order. Those that nobody holds any more return to the queue.

    Named blocks go to its tail in the order given; nameless ones to its head, the first given being the next used.
    So a chain is released deepest block first. Ids that are not held are ignored. `first`: all go to the head;
    named ones can be found until they are used. Under `vmap` it compacts every time: `compact` when there is need,
    and `give_back`, cost less there.
    """
    ids = jnp.asarray(ids, jnp.int32)
    return give_back(lax.cond(_room(pool) < ids.shape[0], compact, lambda p: p, pool), ids, first)


def give_back(pool: PoolState, ids: Int[Array, " K"], first: Bool[Array, ""] | bool = False) -> PoolState:
    """`release` where the ring has room for the ids, as after `compact`: under `vmap` it costs O(ids) too."""
    num_blocks, mask = pool.num_blocks, pool.ring.shape[-1] - 1
    head, tail, num_free = pool.cursor[0], pool.cursor[1], pool.cursor[2]

    real = (ids >= 0) & (ids < num_blocks) & (ids != NULL_BLOCK)
    count = pool.ref_count.at[ids].get(mode="fill", fill_value=0)
    held = real & (count > 0)
    freed = held & (count == 1)
    named = pool.named.at[ids].get(mode="fill", fill_value=False)
    to_tail = freed & named & ~jnp.asarray(first)
    to_head = freed & ~to_tail
    nth_tail = jnp.cumsum(to_tail, dtype=jnp.int32)
    nth_head = jnp.cumsum(to_head, dtype=jnp.int32)
    num_tail = jnp.sum(to_tail, dtype=jnp.int32)
    num_head = jnp.sum(to_head, dtype=jnp.int32)
    head = head - num_head
    slot = jnp.where(to_tail, tail + nth_tail - 1, head + nth_head - 1) & mask
    slot = jnp.where(freed, slot, pool.ring.shape[-1])
    return pool._replace(
        ref_count=pool.ref_count.at[jnp.where(held, ids, num_blocks)].add(-1, mode="drop"),
        place=pool.place.at[jnp.where(freed, ids, num_blocks)].set(slot, mode="drop"),
        ring=pool.ring.at[slot].set(ids, mode="drop"),
        cursor=jnp.stack([head, tail + num_tail, num_free + num_tail + num_head]),
    )


def name(pool: PoolState, ids: Int[Array, " K"]) -> PoolState:
    """Mark `ids` as holding content that others can find."""
    return _flag(pool, ids, True)


def unname(pool: PoolState, ids: Int[Array, " K"]) -> PoolState:
    """Take the names of `ids` away; free ones keep their place in the queue."""
    return _flag(pool, ids, False)


def unname_all(pool: PoolState) -> PoolState:
    """Take all names away; the order of the queue stays."""
    return pool._replace(named=jnp.zeros_like(pool.named))


def _flag(pool: PoolState, ids, value: bool) -> PoolState:
    ids = jnp.asarray(ids, jnp.int32)
    outside = (ids <= NULL_BLOCK) | (ids >= pool.num_blocks)
    ids = jnp.where(outside, pool.num_blocks, ids)
    return pool._replace(named=pool.named.at[ids].set(value, mode="drop"))


def _room(pool: PoolState) -> Int[Array, ""]:
    """Entries that fit into the ring as it is."""
    return pool.ring.shape[-1] - (pool.cursor[1] - pool.cursor[0])


def compact(pool: PoolState) -> PoolState:
    """Drop all stale entries from the ring. O(pool)."""
    capacity = pool.ring.shape[-1]
    head, tail, num_free = pool.cursor[0], pool.cursor[1], pool.cursor[2]
    at = head + jnp.arange(capacity, dtype=jnp.int32)
    entry = pool.ring[at & (capacity - 1)]
    counts = (pool.place[entry] == at & (capacity - 1)) & (at < tail)
    slot = jnp.where(counts, jnp.cumsum(counts, dtype=jnp.int32) - 1, capacity)
    return pool._replace(
        place=pool.place.at[jnp.where(counts, entry, pool.num_blocks)].set(slot, mode="drop"),
        ring=jnp.zeros_like(pool.ring).at[slot].set(entry, mode="drop"),
        cursor=jnp.stack([jnp.zeros_like(head), num_free, num_free]),
    )


def queue(pool: PoolState) -> np.ndarray:
    """Ids of all free blocks, the next victim first. On the host, O(pool)."""
    ring, place = np.asarray(pool.ring), np.asarray(pool.place)
    head, tail, _ = np.asarray(pool.cursor)
    at = np.arange(head, tail) & (len(ring) - 1)
    entry = ring[at]
    return entry[place[entry] == at]


def check_invariants(pool: PoolState) -> None:
    """Raise `RuntimeError`, with the numbers, if the state contradicts itself. On the host, O(pool)."""
    problems = check_ownership(pool, queue(pool))
    head, tail, _ = (int(x) for x in np.asarray(pool.cursor))
    if not 0 <= tail - head <= pool.ring.shape[-1]:
        problems.append(f"queue from {head} to {tail} does not fit a ring of {pool.ring.shape[-1]}")
    if problems:
        raise RuntimeError("block pool: " + "; ".join(problems))


def check_ownership(pool: Any, free: np.ndarray) -> list[str]:
    """What is wrong with who holds what, `free` being the queued blocks; the same for every eviction policy."""
    ref_count, named, num_free = np.asarray(pool.ref_count), np.asarray(pool.named), int(pool.num_free)
    held = np.flatnonzero(ref_count > 0)
    problems = []
    if (ref_count < 0).any():
        problems.append(f"negative reference counts at {np.flatnonzero(ref_count < 0)[:8]}")
    if len(np.unique(free)) != len(free):
        problems.append("a block is queued twice")
    if num_free != len(free):
        problems.append(f"{num_free} blocks counted free, {len(free)} queued")
    if len(free) + len(held) != pool.num_blocks - 1:
        problems.append(f"{len(free)} free + {len(held)} held is not {pool.num_blocks - 1} usable blocks")
    if len(both := np.intersect1d(free, held)):
        problems.append(f"blocks {both[:8]} are both free and held")
    if NULL_BLOCK in free or ref_count[NULL_BLOCK] or named[NULL_BLOCK]:
        problems.append("the null block is free, held or named")
    return problems


__all__ = [
    "NULL_BLOCK",
    "PoolState",
    "acquire",
    "allocate",
    "check_invariants",
    "check_ownership",
    "check_size",
    "compact",
    "give_back",
    "init",
    "name",
    "queue",
    "release",
    "touch",
    "unname",
    "unname_all",
]

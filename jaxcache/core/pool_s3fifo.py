"""A block pool that scans do not flush: two eviction queues and a memory of what was evicted.

After S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023), with three changes for
prefix caching. Content asked for once waits in the *small* queue, content asked for again, or asked for soon after
it was evicted (a *ghost*), in the *main* queue. The changes:

- Chains stay whole: blocks are released deepest first, and a block goes to the main queue if it or any deeper
  block released with it does, so that no block outlives the one before it, without which it cannot be found.
- The queues are compared by age instead of size: a block of the main queue counts as younger by a head start.
- The head start follows the ghosts, as in ARC (Megiddo and Modha, FAST 2003): a returning block that the small
  queue lost shortens it, one that the main queue lost lengthens it, each weighted by how rarely its kind is lost.
  It begins at nothing, which is the order of `core.pool`, and it takes ghosts to leave that.

The transitions are those of `core.pool` and keep its promises: pure, static shapes, O(ids), failure as a flag; but
stale entries between two that are not are read again until the first of the two is taken.
Ages are differences of counters that may wrap around; `compact` keeps them below 2**30.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxcache.core.pool import NULL_BLOCK, check_ownership, check_size

SMALL, MAIN = 0, 1
HORIZON = 16
"""Ghosts are remembered for, and a head start is at most, this many times the pool's size, in blocks (of the older
ghosts the table loses some to younger ones).

It must cover the time after which content comes back; where it does not, the head start follows accidents. With 6,
pools of 600 to 900 blocks lost up to 8 % against lru on a trace whose contents return after 5 to 40 pool sizes."""
SPEED = 3.0
"""How far a pool's worth of returning ghosts moves the head start, in pool sizes."""
_OLDEST = 2**30


class S3PoolState(NamedTuple):
    """`N` blocks, two rings of `C` entries (a power of two, at least `4 * N`), `G` ghosts (likewise, `8 * N`)."""

    ref_count: Int[Array, "*batch N"]
    """How many sequences hold the block."""
    named: Bool[Array, "*batch N"]
    """Whether the block's content can be found by others."""
    hot: Bool[Array, "*batch N"]
    """Whether the content was asked for more than once: released, the block goes to the main queue."""
    fingerprint: UInt32[Array, "*batch N"]
    """Of the content of a named block."""
    stamp: Int[Array, "*batch N"]
    """Which of the block's ring entries counts."""
    ring: Int[Array, "*batch 2 C"]
    ring_stamp: Int[Array, "*batch 2 C"]
    ring_time: Int[Array, "*batch 2 C"]
    """The clock when the entry was made; never increasing towards the head."""
    ends: Int[Array, "*batch 2 2"]
    """Head and tail of each queue, masked to index the ring."""
    counts: Int[Array, "*batch 4"]
    """Free blocks; usable blocks; clock (named blocks queued so far); blocks evicted so far."""
    ghosts: Int[Array, "*batch G 3"]
    """By fingerprint modulo `G`: the fingerprint, when it was evicted, from which queue."""
    balance: Float[Array, "*batch 3"]
    """The main queue's head start, in pool sizes; recent evictions from the small and from the main queue."""

    @property
    def num_blocks(self) -> int:
        return self.ref_count.shape[-1]

    @property
    def num_free(self) -> Int[Array, "*batch"]:
        """Blocks that nobody holds, named ones included."""
        return self.counts[..., 0]


def init(num_blocks: int, num_usable: int | Int[Array, ""] | None = None) -> S3PoolState:
    """As `pool.init`."""
    check_size(num_blocks)
    capacity = 1 << (4 * int(num_blocks) - 1).bit_length()
    free = jnp.asarray(num_blocks - 1 if num_usable is None else num_usable, jnp.int32)
    zero = jnp.zeros((), jnp.int32)
    rings = jnp.zeros((2, capacity), jnp.int32)
    return S3PoolState(
        ref_count=jnp.zeros(num_blocks, jnp.int32),
        named=jnp.zeros(num_blocks, jnp.bool_),
        hot=jnp.zeros(num_blocks, jnp.bool_),
        fingerprint=jnp.zeros(num_blocks, jnp.uint32),
        stamp=jnp.zeros(num_blocks, jnp.int32),
        ring=rings.at[SMALL, : num_blocks - 1].set(jnp.arange(1, num_blocks, dtype=jnp.int32)),
        ring_stamp=jnp.zeros((2, capacity), jnp.int32),
        ring_time=jnp.full((2, capacity), -_OLDEST, jnp.int32),
        ends=jnp.stack([jnp.stack([zero, free]), jnp.stack([zero, zero])]),
        counts=jnp.stack([free, free, zero, zero]),
        ghosts=jnp.full((2 * capacity, 3), -_OLDEST, jnp.int32),
        balance=jnp.array([0.0, 1.0, 1.0], jnp.float32),
    )


def acquire(
    pool: S3PoolState,
    hits: Int[Array, " K"],
    n: Int[Array, ""] | int,
    headroom: Int[Array, ""] | int = 0,
    *,
    capacity: int,
) -> tuple[S3PoolState, Int[Array, " capacity"], Bool[Array, ""]]:
    """As `pool.acquire`. Hits become hot; named blocks that are taken leave a ghost."""
    num_blocks = pool.num_blocks
    n, headroom = jnp.asarray(n, jnp.int32), jnp.asarray(headroom, jnp.int32)
    hits = jnp.asarray(hits, jnp.int32)

    real = (hits > NULL_BLOCK) & (hits < num_blocks)
    was_free = real & (pool.ref_count.at[hits].get(mode="fill", fill_value=1) == 0)
    num_revived = jnp.sum(was_free, dtype=jnp.int32)
    ok = (n >= 0) & (n <= capacity) & (num_revived + n + headroom <= pool.num_free)
    n, num_revived = jnp.where(ok, n, 0), jnp.where(ok, num_revived, 0)

    stamp = pool.stamp.at[jnp.where(ok & was_free, hits, num_blocks)].add(1, mode="drop")
    new_ids, ends, num_small = _take(pool, stamp, n, capacity)
    pool = _bury(pool, new_ids, num_small)
    touched = jnp.where(ok & real, hits, num_blocks)
    pool = pool._replace(
        ref_count=pool.ref_count.at[jnp.concatenate([touched, new_ids])].add(1, mode="drop"),
        named=pool.named.at[new_ids].set(False, mode="drop"),
        hot=pool.hot.at[new_ids].set(False, mode="drop").at[touched].set(True, mode="drop"),
        stamp=stamp.at[new_ids].add(1, mode="drop"),
        ends=ends,
        counts=pool.counts.at[0].add(-num_revived - n),
    )
    return pool, new_ids, ok


def _take(pool: S3PoolState, stamp, n, capacity: int):
    """The `n` oldest blocks of both queues, the rings' ends after them, and how many came from the small one."""
    if capacity == 0:
        return jnp.zeros(0, jnp.int32), pool.ends, jnp.zeros((), jnp.int32)
    ids, ages, after = jax.vmap(_peek, in_axes=(0, 0, 0, 0, None, None, None, None))(
        pool.ring, pool.ring_stamp, pool.ring_time, pool.ends, stamp, pool.counts[2], n, capacity
    )
    head_start = (pool.balance[0] * pool.counts[1].astype(jnp.float32)).astype(jnp.int32)
    small, main = -ages[SMALL], head_start - ages[MAIN]
    nth = jnp.arange(capacity, dtype=jnp.int32)
    older_in_main = jnp.searchsorted(main, small).astype(jnp.int32)
    num_small = jnp.sum(nth + older_in_main < n, dtype=jnp.int32)
    taken = jnp.stack([num_small, n - num_small])
    heads = jnp.where(taken > 0, after[jnp.arange(2), jnp.maximum(taken - 1, 0)], _past_stale(pool.ends, after, n))
    whole_turns = heads & ~(pool.ring.shape[-1] - 1)
    new_ids = jnp.where(nth < num_small, ids[SMALL], ids[MAIN][jnp.maximum(nth - num_small, 0)])
    new_ids = jnp.where(nth < n, new_ids, pool.num_blocks)
    return new_ids, jnp.stack([heads - whole_turns, pool.ends[:, 1] - whole_turns], axis=1), num_small


def _past_stale(ends, after, n):
    """Where each queue's first entry that is not stale lies, if `n` were looked for: the next head."""
    empty = jnp.where(n > 0, ends[:, 1], ends[:, 0])
    return jnp.where(after[:, 0] == -_OLDEST, empty, after[:, 0] - 1)


def _peek(ring, ring_stamp, ring_time, ends, stamp, clock, n, capacity: int):
    """Of one queue, the first `n` entries that are not stale: ids, ages, and the positions after them.

    Where there are fewer, ids are `num_blocks` and ages so small that anything else is older.
    """
    mask = ring.shape[-1] - 1
    window = jnp.arange(capacity + capacity // 2 + 8, dtype=jnp.int32)

    def more(carry):
        position, found, *_ = carry
        return (found < n) & (position < ends[1])

    def look(carry):
        position, found, ids, ages, after = carry
        at = position + window
        entry = ring[at & mask]
        counts = (ring_stamp[at & mask] == stamp[entry]) & (at < ends[1])
        nth = found + jnp.cumsum(counts, dtype=jnp.int32)
        slot = jnp.where(counts & (nth <= n), nth - 1, capacity)
        return (
            position + window.shape[0],
            jnp.minimum(nth[-1], n),
            ids.at[slot].set(entry, mode="drop"),
            ages.at[slot].set(jnp.minimum(clock - ring_time[at & mask], _OLDEST), mode="drop"),
            after.at[slot].set(at + 1, mode="drop"),
        )

    nobody = jnp.full(capacity, stamp.shape[0], jnp.int32)
    never = jnp.full(capacity, -_OLDEST, jnp.int32)
    zero = jnp.zeros((), jnp.int32)
    _, _, ids, ages, after = lax.while_loop(more, look, (ends[0], zero, nobody, never, never))
    return ids, ages, after


def _bury(pool: S3PoolState, ids, num_small) -> S3PoolState:
    """Remember the named ones of `ids`, of which the first `num_small` came from the small queue."""
    named = pool.named.at[ids].get(mode="fill", fill_value=False)
    from_main = jnp.arange(ids.shape[0], dtype=jnp.int32) >= num_small
    time = pool.counts[3] + jnp.cumsum(named, dtype=jnp.int32)
    fingerprint = pool.fingerprint.at[ids].get(mode="fill", fill_value=0)
    slot = jnp.where(named, _slot(pool, fingerprint), pool.ghosts.shape[-2])
    rows = jnp.stack([_signed(fingerprint), time, from_main.astype(jnp.int32)], axis=1)
    lost = jnp.stack([jnp.sum(named & ~from_main), jnp.sum(named & from_main)]).astype(jnp.float32)
    fade = jnp.maximum(1.0 - jnp.sum(lost) / (HORIZON * pool.counts[1].astype(jnp.float32)), 0.0)
    return pool._replace(
        ghosts=pool.ghosts.at[slot].set(rows, mode="drop"),
        counts=pool.counts.at[3].add(jnp.sum(named, dtype=jnp.int32)),
        balance=pool.balance.at[1:].set(pool.balance[1:] * fade + lost),
    )


def release(pool: S3PoolState, ids: Int[Array, " K"], first: Bool[Array, ""] | bool = False) -> S3PoolState:
    """As `pool.release`: `ids` are one chain, deepest block first. What is hot always goes to the main queue."""
    ids = jnp.asarray(ids, jnp.int32)
    full = jnp.any(pool.ends[:, 1] - pool.ends[:, 0] + ids.shape[0] > pool.ring.shape[-1])
    return give_back(lax.cond(full, compact, lambda p: p, pool), ids, first)


def give_back(pool: S3PoolState, ids: Int[Array, " K"], first: Bool[Array, ""] | bool = False) -> S3PoolState:
    """`release` where the rings have room for the ids, as after `compact`."""
    num_blocks, mask = pool.num_blocks, pool.ring.shape[-1] - 1
    real = (ids > NULL_BLOCK) & (ids < num_blocks)
    count = pool.ref_count.at[ids].get(mode="fill", fill_value=0)
    held = real & (count > 0)
    freed = held & (count == 1)
    named = pool.named.at[ids].get(mode="fill", fill_value=False)
    hot = jnp.cumsum(pool.hot.at[ids].get(mode="fill", fill_value=False) & held, dtype=jnp.int32) > 0

    to_main = freed & named & hot
    to_small = freed & named & ~hot & ~jnp.asarray(first)
    to_head = freed & ~to_main & ~to_small
    (heads, tails), clock = pool.ends.T, pool.counts[2]
    head = heads[SMALL] - jnp.sum(to_head, dtype=jnp.int32)
    clock_after = clock + jnp.sum(freed & named, dtype=jnp.int32)
    slot = jnp.select(
        [to_head, to_small, to_main],
        [_nth(to_head) + head, _nth(to_small) + tails[SMALL], _nth(to_main) + tails[MAIN]],
    )
    slot = jnp.where(freed, slot & mask, mask + 1)
    queue = to_main.astype(jnp.int32)
    added = jnp.stack([jnp.sum(to_small, dtype=jnp.int32), jnp.sum(to_main, dtype=jnp.int32)])
    stamps = pool.stamp.at[ids].get(mode="fill", fill_value=0)
    return pool._replace(
        ref_count=pool.ref_count.at[jnp.where(held, ids, num_blocks)].add(-1, mode="drop"),
        hot=pool.hot.at[jnp.where(held & named, ids, num_blocks)].set(hot, mode="drop"),
        ring=pool.ring.at[queue, slot].set(ids, mode="drop"),
        ring_stamp=pool.ring_stamp.at[queue, slot].set(stamps, mode="drop"),
        ring_time=pool.ring_time.at[queue, slot].set(
            jnp.where(to_head, clock_after - _OLDEST, clock_after), mode="drop"
        ),
        ends=jnp.stack([heads.at[SMALL].set(head), tails + added], axis=1),
        counts=jnp.stack(
            [pool.counts[0] + jnp.sum(freed, dtype=jnp.int32), pool.counts[1], clock_after, pool.counts[3]]
        ),
    )


def name(pool: S3PoolState, ids: Int[Array, " K"], fingerprints: UInt32[Array, " K"]) -> S3PoolState:
    """Mark `ids` as holding content that others can find, each with 32 bits that tell contents apart.

    Content that was evicted not long ago is hot, and shifts the balance of the queues.
    """
    ids, fingerprints = jnp.asarray(ids, jnp.int32), jnp.asarray(fingerprints, jnp.uint32)
    ids = jnp.where((ids > NULL_BLOCK) & (ids < pool.num_blocks), ids, pool.num_blocks)
    slot = _slot(pool, fingerprints)
    rows = pool.ghosts[slot]
    evicted, size = pool.counts[3], pool.counts[1]
    known = (
        (ids < pool.num_blocks) & (rows[:, 0] == _signed(fingerprints)) & (evicted - rows[:, 1] <= HORIZON * size)
    )
    forget = jnp.where(known, slot, pool.ghosts.shape[-2])
    return pool._replace(
        named=pool.named.at[ids].set(True, mode="drop"),
        hot=pool.hot.at[ids].set(known, mode="drop"),
        fingerprint=pool.fingerprint.at[ids].set(fingerprints, mode="drop"),
        ghosts=pool.ghosts.at[forget, 1].set(evicted - _OLDEST, mode="drop"),
        balance=pool.balance.at[0].set(_shifted(pool, known, rows[:, 2] == MAIN)),
    )


def _shifted(pool: S3PoolState, known, from_main):
    """The head start after ghosts came back: in proportion to their number, in units of the pool's size."""
    head_start, lost_small, lost_main = pool.balance
    ratio = jnp.maximum(lost_main, 1.0) / jnp.maximum(lost_small, 1.0)
    shorter = jnp.sum(known & ~from_main).astype(jnp.float32) * jnp.maximum(ratio, 1.0)
    longer = jnp.sum(known & from_main).astype(jnp.float32) * jnp.maximum(1.0 / ratio, 1.0)
    change = SPEED * (longer - shorter) / pool.counts[1].astype(jnp.float32)
    return jnp.clip(head_start + change, 0.0, float(HORIZON))


def unname(pool: S3PoolState, ids: Int[Array, " K"]) -> S3PoolState:
    """Take the names of `ids` away; free ones keep their place in the queue, and leave no ghost."""
    ids = jnp.asarray(ids, jnp.int32)
    ids = jnp.where(ids > NULL_BLOCK, ids, pool.num_blocks)
    return pool._replace(named=pool.named.at[ids].set(False, mode="drop"))


def unname_all(pool: S3PoolState) -> S3PoolState:
    """Take all names away, and forget all ghosts; the order of the queues stays."""
    return pool._replace(
        named=jnp.zeros_like(pool.named),
        hot=jnp.zeros_like(pool.hot),
        ghosts=pool.ghosts.at[:, 1].set(pool.counts[3] - _OLDEST),
    )


def compact(pool: S3PoolState) -> S3PoolState:
    """Drop all stale entries from both rings, and bound ages. O(pool)."""
    capacity = pool.ring.shape[-1]
    clock = pool.counts[2]

    def squeeze(ring, ring_stamp, ring_time, ends):
        at = ends[0] + jnp.arange(capacity, dtype=jnp.int32)
        here = at & (capacity - 1)
        entry, stamps = ring[here], ring_stamp[here]
        counts = (stamps == pool.stamp[entry]) & (at < ends[1])
        slot = jnp.where(counts, _nth(counts), capacity)
        times = clock - jnp.minimum(clock - ring_time[here], _OLDEST)
        return (
            jnp.zeros_like(ring).at[slot].set(entry, mode="drop"),
            jnp.full_like(ring_stamp, -1).at[slot].set(stamps, mode="drop"),
            jnp.zeros_like(ring_time).at[slot].set(times, mode="drop"),
            jnp.stack([jnp.zeros_like(clock), jnp.sum(counts, dtype=jnp.int32)]),
        )

    ring, ring_stamp, ring_time, ends = jax.vmap(squeeze)(pool.ring, pool.ring_stamp, pool.ring_time, pool.ends)
    return pool._replace(ring=ring, ring_stamp=ring_stamp, ring_time=ring_time, ends=ends)


def _nth(flags):
    """How many flags are set before each."""
    return jnp.cumsum(flags, dtype=jnp.int32) - flags.astype(jnp.int32)


def _slot(pool: S3PoolState, fingerprints):
    return (fingerprints & jnp.uint32(pool.ghosts.shape[-2] - 1)).astype(jnp.int32)


def _signed(fingerprints):
    return lax.bitcast_convert_type(fingerprints, jnp.int32)


def queue(pool: S3PoolState) -> np.ndarray:
    """Ids of all free blocks in the order in which they would be taken now. On the host, O(pool)."""
    ids, deadlines = [], []
    clock, stamp = int(pool.counts[2]), np.asarray(pool.stamp)
    head_start = int(float(pool.balance[0]) * int(pool.counts[1]))
    for nth in (SMALL, MAIN):
        ring, ring_stamp, ring_time, ends = (
            np.asarray(x[nth]) for x in (pool.ring, pool.ring_stamp, pool.ring_time, pool.ends)
        )
        at = np.arange(*ends) & (len(ring) - 1)
        at = at[ring_stamp[at] == stamp[ring[at]]]
        ids.append(ring[at])
        deadlines.append(nth * head_start - np.minimum(clock - ring_time[at], _OLDEST))
    order = np.argsort(np.concatenate(deadlines), kind="stable")
    return np.concatenate(ids)[order]


def check_invariants(pool: S3PoolState) -> None:
    """Raise `RuntimeError`, with the numbers, if the state contradicts itself. On the host, O(pool)."""
    problems = check_ownership(pool, queue(pool))
    for name_, (head, tail) in zip(("small", "main"), np.asarray(pool.ends)):
        if not 0 <= tail - head <= pool.ring.shape[-1]:
            problems.append(f"{name_} queue from {head} to {tail} does not fit a ring of {pool.ring.shape[-1]}")
    if not 0.0 <= float(pool.balance[0]) <= HORIZON:
        problems.append(f"head start {pool.balance[0]} is not in [0, {HORIZON}]")
    if problems:
        raise RuntimeError("block pool: " + "; ".join(problems))


__all__ = [
    "HORIZON",
    "S3PoolState",
    "acquire",
    "check_invariants",
    "compact",
    "give_back",
    "init",
    "name",
    "queue",
    "release",
    "unname",
    "unname_all",
]

"""The scan-resistant pool against a small oracle of lists and dicts, and what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.core import pool_s3fifo
from jaxcache.core.block_pool import BlockPool
from jaxcache.core.config import CacheConfig
from jaxcache.core.pool_s3fifo import HORIZON, SPEED

pytestmark = pytest.mark.core


class Oracle:
    """The rules of `core.pool_s3fifo`, one block at a time."""

    def __init__(self, num_blocks):
        self.size = num_blocks - 1
        self.queues = [[(-(2**30), block) for block in range(1, num_blocks)], []]
        self.refs, self.content, self.hot = {}, {}, set()
        self.ghosts, self.clock, self.evicted = {}, 0, 0
        self.head_start, self.lost = np.float32(0), [np.float32(1), np.float32(1)]
        self.num_slots = 2 * (1 << (4 * num_blocks - 1).bit_length())

    @property
    def num_free(self):
        return sum(map(len, self.queues))

    def touch(self, hits):
        for block in hits:
            for queue in self.queues:
                queue[:] = [entry for entry in queue if entry[1] != block]
            self.refs[block] = self.refs.get(block, 0) + 1
            self.hot.add(block)

    def allocate(self, n):
        ids, lost, head_start = [[], []], [0, 0], int(self.head_start * np.float32(self.size))
        for _ in range(n):
            small, main = self.queues
            from_main = not small or (bool(main) and main[0][0] + head_start < small[0][0])
            ids[from_main].append(self.queues[from_main].pop(0)[1])
        for from_main in (0, 1):
            for block in ids[from_main]:
                if block in self.content:
                    self.evicted += 1
                    lost[from_main] += 1
                    content = self.content.pop(block)
                    self.ghosts[content % self.num_slots] = (content, self.evicted, from_main)
                self.hot.discard(block)
                self.refs[block] = 1
        fade = max(np.float32(1) - np.float32(sum(lost)) / np.float32(HORIZON * self.size), np.float32(0))
        self.lost = [np.float32(old * fade + new) for old, new in zip(self.lost, lost)]
        return ids[0] + ids[1]

    def name(self, ids, contents):
        back = [0, 0]
        for block, content in zip(ids, contents):
            self.content[block] = content
            ghost = self.ghosts.get(content % self.num_slots)
            if ghost and ghost[0] == content and self.evicted - ghost[1] <= HORIZON * self.size:
                self.hot.add(block)
                back[ghost[2]] += 1
        for block in ids:
            if block in self.hot:
                del self.ghosts[self.content[block] % self.num_slots]
        ratio = max(self.lost[1], 1) / max(self.lost[0], 1)
        change = SPEED * (back[1] * max(1 / ratio, 1) - back[0] * max(ratio, 1)) / self.size
        self.head_start = np.float32(min(max(self.head_start + change, 0), HORIZON))

    def release(self, ids, first=False):
        freed, hot, places = [], False, {}
        for block in ids:
            hot = hot or block in self.hot
            if block in self.content and hot:
                self.hot.add(block)
            self.refs[block] -= 1
            if self.refs[block] == 0:
                freed.append(block)
                places[block] = hot
        self.clock += sum(block in self.content for block in freed)
        head = [b for b in freed if b not in self.content or (first and not places[b])]
        for block in freed:
            if block not in head:
                self.queues[places[block]].append((self.clock, block))
        self.queues[0][:0] = [(self.clock - 2**30, block) for block in head]

    def order(self):
        head_start = int(self.head_start * np.float32(self.size))
        oldest = self.clock - 2**30
        waiting = [(max(t, oldest) + nth * head_start, nth, b) for nth in (0, 1) for t, b in self.queues[nth]]
        return [block for *_, block in sorted(waiting, key=lambda entry: entry[:2])]


def play(seed, num_blocks=24, steps=400):
    """Requests over a few chains of contents: hit what is there, allocate and name the rest, release in time."""
    rng = np.random.default_rng(seed)
    oracle, tested, running = Oracle(num_blocks), BlockPool(num_blocks, "s3fifo"), []
    popularity = rng.zipf(1.3, 1000) % 25
    for step in range(steps):
        if running and rng.random() < 0.5:
            ids, first = running.pop(rng.integers(len(running))), bool(rng.random() < 0.2)
            oracle.release(ids, first)
            tested.release(ids, first)
        else:
            chain = int(popularity[rng.integers(1000)]) * 100_003 + np.arange(rng.integers(1, 9))
            resident = {content: block for block, content in oracle.content.items()}
            hits = []
            for content in chain.tolist():
                if content not in resident:
                    break
                hits.append(resident[content])
            n = len(chain) - len(hits) + int(rng.integers(2))
            new = tested.acquire(hits, n)
            fits = sum(oracle.refs.get(b, 0) == 0 for b in hits) + n <= oracle.num_free
            assert (new is not None) == fits
            if fits:
                oracle.touch(hits)
                assert new.tolist() == oracle.allocate(n), step
                contents = chain[len(hits) :]
                named = new[: len(contents)].tolist()
                oracle.name(named, contents.tolist())
                tested.name(named, contents.astype(np.uint32))
                running.append([*hits, *new.tolist()][::-1])
        assert tested.num_free == oracle.num_free
        assert tested.queue().tolist() == oracle.order(), step
        tested.check_invariants()
    return oracle


@pytest.mark.parametrize("seed", range(4))
def test_it_does_what_the_oracle_does(seed):
    oracle = play(seed)
    assert oracle.evicted > 100
    assert oracle.head_start > 0


def hold_and_release(state, ids, contents):
    """Allocate, name and give back a chain of contents."""
    state, new, ok = pool_s3fifo.acquire(state, jnp.zeros(0, jnp.int32), ids, capacity=8)
    assert bool(ok)
    state = pool_s3fifo.name(state, new[:ids], jnp.asarray(contents, jnp.uint32))
    return pool_s3fifo.release(state, new[:ids][::-1]), new[:ids]


@pytest.mark.parametrize(("policy", "least", "most"), [("lru", 0, 0), ("s3fifo", 20, 29)])
def test_what_is_asked_for_again_and_again_learns_to_outlive_scans(policy, least, most):
    """Four contents, then two scans of 8 others, 30 times, with 16 usable blocks. The first scans teach it."""
    tested, resident, hits = BlockPool(17, policy), {}, 0

    def admit(contents):
        found = [resident[content] for content in contents if content in resident]
        new = tested.acquire(found, len(contents) - len(found)).tolist()
        for content in [content for content, block in resident.items() if block in new]:
            del resident[content]
        missing = [content for content in contents if content not in resident]
        resident.update(zip(missing, new))
        tested.name(new, np.array(missing, np.uint32))
        tested.release([resident[content] for content in reversed(contents)])
        return len(found)

    for nth in range(30):
        hits += admit(range(4)) == 4
        for first in (100 * nth + 50, 100 * nth + 70):
            admit(range(first, first + 8))
        tested.check_invariants()
    assert least <= hits <= most


def test_a_block_is_never_hotter_than_the_one_before_it():
    """Only the deepest block of a chain comes back from the dead, and takes its parents to the main queue."""
    state = pool_s3fifo.init(9)
    state, ids, _ = pool_s3fifo.acquire(state, jnp.zeros(0, jnp.int32), 3, capacity=4)
    state = pool_s3fifo.name(state, ids, jnp.arange(4, dtype=jnp.uint32))
    state = state._replace(hot=state.hot.at[ids[2]].set(True))
    state = pool_s3fifo.release(state, ids[:3][::-1])
    assert state.hot[ids[:3]].tolist() == [True, True, True]
    assert pool_s3fifo.queue(state).tolist()[-3:] == ids[:3][::-1].tolist()


def test_nameless_blocks_are_used_first():
    state = pool_s3fifo.init(9)
    state, _ = hold_and_release(state, 4, range(4))
    state, ids, _ = pool_s3fifo.acquire(state, jnp.zeros(0, jnp.int32), 2, capacity=4)
    state = pool_s3fifo.release(state, ids[:2])
    assert pool_s3fifo.queue(state).tolist()[:2] == ids[:2].tolist()


def test_a_failed_acquire_changes_nothing():
    state, ids = hold_and_release(pool_s3fifo.init(9), 4, range(4))
    after, new, ok = pool_s3fifo.acquire(state, ids, 5, capacity=8)
    assert not ok
    assert (new == 9).all()
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_forgotten_names_leave_no_ghosts():
    state, ids = hold_and_release(pool_s3fifo.init(9), 8, range(8))
    state = pool_s3fifo.unname(state, ids)
    state, _ = hold_and_release(state, 8, range(100, 108))
    assert int(state.counts[3]) == 0
    state = pool_s3fifo.unname_all(state)
    state, ids = hold_and_release(state, 8, range(8))
    assert not state.hot.any()


def test_transitions_work_under_scan_and_vmap_and_compaction_keeps_the_order():
    def turn(state, contents):
        state, ids, ok = pool_s3fifo.acquire(state, jnp.zeros(0, jnp.int32), 5, capacity=5)
        return pool_s3fifo.release(pool_s3fifo.name(state, ids, contents), ids[::-1]), ok

    contents = jnp.arange(60 * 5, dtype=jnp.uint32).reshape(60, 5)
    one, ok = jax.jit(lambda s: jax.lax.scan(turn, s, contents))(pool_s3fifo.init(8))
    assert ok.all()
    both, _ = jax.vmap(lambda n: jax.lax.scan(turn, pool_s3fifo.init(8, n), contents))(jnp.array([7, 6]))
    np.testing.assert_array_equal(both.ref_count[0], one.ref_count)
    assert pool_s3fifo.queue(jax.tree.map(lambda x: x[0], both)).tolist() == pool_s3fifo.queue(one).tolist()
    assert both.num_free.tolist() == [7, 6]
    assert pool_s3fifo.queue(pool_s3fifo.compact(one)).tolist() == pool_s3fifo.queue(one).tolist()


def test_the_policy_is_checked():
    with pytest.raises(ValueError, match="eviction_policy must be one of lru, s3fifo, got 'mru'"):
        CacheConfig(eviction_policy="mru")


def test_entries_that_are_stale_are_passed_once_even_if_nothing_is_taken_behind_them():
    """A chain that is asked for again and again leaves entries in the main queue, in front of its last one."""
    state = pool_s3fifo.init(40)
    state, chain = hold_and_release(state, 6, range(6))
    nobody = jnp.full(8, 40, jnp.int32)
    for _ in range(5):
        state, _, ok = pool_s3fifo.acquire(state, chain, 0, capacity=8)
        assert ok
        state = pool_s3fifo.release(state, chain[::-1])
    before = pool_s3fifo.queue(state).tolist()
    head, tail = state.ends[pool_s3fifo.MAIN].tolist()
    assert tail - head == 5 * 6
    state, new, ok = pool_s3fifo.acquire(state, nobody, 1, capacity=8)
    assert ok
    assert new[0] not in chain
    assert state.ends[pool_s3fifo.MAIN].tolist() == [tail - 6, tail]
    assert pool_s3fifo.queue(state).tolist() == before[1:]
    pool_s3fifo.check_invariants(state)

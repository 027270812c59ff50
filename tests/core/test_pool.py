"""The pool's transitions against an oracle of a dict and a deque, plain, jitted, scanned and vmapped."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcache.core import pool
from jaxcache.core.block_pool import BlockPool

pytestmark = pytest.mark.core
WIDTH = 6
"""Ids per call in these tests."""

acquire = jax.jit(lambda state, hits, n, headroom: pool.acquire(state, hits, n, headroom, capacity=WIDTH))
release = jax.jit(pool.release)
name, unname = jax.jit(pool.name), jax.jit(pool.unname)


class Oracle:
    """What the pool must do, block by block."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = deque(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.named: set[int] = set()

    def acquire(self, hits, n, headroom=0):
        free_hits = [i for i in hits if self.refs[i] == 0]
        if n > WIDTH or n + len(free_hits) + headroom > len(self.queue):
            return None
        for i in hits:
            if self.refs[i] == 0:
                self.queue.remove(i)
            self.refs[i] += 1
        ids = [self.queue.popleft() for _ in range(n)]
        for i in ids:
            self.refs[i] = 1
        self.named -= set(ids)
        return ids

    def release(self, ids, first=False):
        head = []
        for i in ids:
            if self.refs[i] == 0:
                continue
            self.refs[i] -= 1
            if self.refs[i] == 0:
                (self.queue if i in self.named and not first else head).append(i)
        self.queue.extendleft(reversed(head))


def padded(ids, num_blocks):
    return jnp.array([*ids, *[num_blocks] * (WIDTH - len(ids))], jnp.int32)


def agree(state, oracle):
    pool.check_invariants(state)
    assert pool.queue(state).tolist() == list(oracle.queue)
    assert np.asarray(state.ref_count)[1:].tolist() == list(oracle.refs.values())
    assert set(np.flatnonzero(np.asarray(state.named)).tolist()) == oracle.named


def operations(num_blocks):
    ids = st.lists(st.integers(1, num_blocks - 1), unique=True, max_size=WIDTH)
    return st.lists(
        st.one_of(
            st.tuples(st.just("acquire"), ids, st.integers(0, WIDTH + 1), st.integers(0, 2)),
            st.tuples(st.just("release"), ids, st.booleans()),
            st.tuples(st.just("name"), ids),
            st.tuples(st.just("unname"), ids),
            st.tuples(st.just("compact")),
        ),
        max_size=80,
    )


@given(ops=operations(12))
@settings(max_examples=60, deadline=None)
def test_random_operations_do_what_the_oracle_does(ops):
    state, oracle = pool.init(12), Oracle(12)
    for op, *arguments in ops:
        if op == "acquire":
            hits, n, headroom = arguments
            state, got, ok = acquire(state, padded(hits, 12), n, headroom)
            expected = oracle.acquire(hits, n, headroom)
            assert bool(ok) == (expected is not None)
            assert got.tolist() == [*(expected or []), *[12] * (WIDTH - len(expected or []))]
        elif op == "release":
            ids, first = arguments
            state = release(state, padded(ids, 12), first)
            oracle.release(ids, first)
        elif op == "compact":
            state = pool.compact(state)
        else:
            state = (name if op == "name" else unname)(state, padded(arguments[0], 12))
            change = oracle.named.update if op == "name" else oracle.named.difference_update
            change(arguments[0])
        agree(state, oracle)


def test_a_full_ring_is_squeezed_and_nothing_is_lost():
    """Touching and releasing a free block leaves one stale entry each time; the ring has room for only so many."""
    state, oracle = pool.init(5), Oracle(5)
    state = name(state, padded([1, 2], 5))
    oracle.named |= {1, 2}
    capacity = state.ring.shape[0]
    for nth in range(3 * capacity):
        ids = [1 + nth % 2, 3]
        state, _, ok = acquire(state, padded(ids, 5), 0, 0)
        assert ok
        oracle.acquire(ids, 0)
        state = release(state, padded(ids, 5))
        oracle.release(ids)
        agree(state, oracle)


def test_cursors_stay_small_however_long_the_pool_lives():
    state = name(pool.init(5), padded([1, 2, 3, 4], 5))

    def turn(state, _):
        state, ids, ok = pool.acquire(state, jnp.zeros(0, jnp.int32), 3, capacity=WIDTH)
        return pool.release(pool.name(state, ids), ids), ok

    state, ok = jax.lax.scan(turn, state, length=200)
    assert ok.all()
    assert int(jnp.abs(state.cursor).max()) <= 2 * state.ring.shape[0]
    pool.check_invariants(state)


def test_failure_leaves_the_state_as_it_was():
    state = pool.init(8)
    state, ids, ok = pool.allocate(state, 5, capacity=5)
    assert ok
    state = pool.release(pool.name(state, ids[:2]), ids[:2])
    for hits, n, headroom in (([1], 4, 0), ([1, 2], 2, 1), ([], WIDTH + 1, 0), ([], -1, 0)):
        after, got, ok = acquire(state, padded(hits, 8), n, headroom)
        assert not ok
        assert got.tolist() == [8] * WIDTH
        assert all(jnp.array_equal(a, b) for a, b in zip(after, state, strict=True))


KINDS = ("acquire", "release", "name", "unname", "compact")
NUM_OPERATIONS = 40


def encoded(ops, num_blocks):
    """Operations as arrays for `turn`; those that are missing at the end are `compact`."""
    rows = [(KINDS.index(op), *arguments) for op, *arguments in ops[:NUM_OPERATIONS]]
    kinds = np.full(NUM_OPERATIONS, KINDS.index("compact"), np.int32)
    ids, numbers = np.full((NUM_OPERATIONS, WIDTH), num_blocks, np.int32), np.zeros((NUM_OPERATIONS, 2), np.int32)
    for nth, (kind, *arguments) in enumerate(rows):
        kinds[nth] = kind
        if arguments:
            ids[nth, : len(arguments[0])] = arguments[0]
            numbers[nth, : len(arguments) - 1] = arguments[1:]
    return kinds, ids, numbers


def turn(state, op):
    """One operation of any kind: `(pool, (pool, ids, whether it succeeded))`."""
    kind, ids, numbers = op
    nothing = jnp.full(WIDTH, state.num_blocks, jnp.int32), jnp.bool_(True)
    state, new, ok = jax.lax.switch(
        kind,
        [
            lambda: pool.acquire(state, ids, numbers[0], numbers[1], capacity=WIDTH),
            lambda: (pool.release(state, ids, numbers[0] > 0), *nothing),
            lambda: (pool.name(state, ids), *nothing),
            lambda: (pool.unname(state, ids), *nothing),
            lambda: (pool.compact(state), *nothing),
        ],
    )
    return state, (state, new, ok)


def follow(ops):
    """All states that operations on a pool of 12 blocks go through, in one `scan`."""
    return jax.lax.scan(turn, pool.init(12), ops)[1]


scanned, scanned_together = jax.jit(follow), jax.jit(jax.vmap(follow))


def agree_all_the_way(ops, states, ids, ok):
    oracle = Oracle(12)
    for nth, (op, *arguments) in enumerate(ops[:NUM_OPERATIONS]):
        if op == "acquire":
            expected = oracle.acquire(*arguments)
            assert bool(ok[nth]) == (expected is not None)
            assert ids[nth].tolist() == [*(expected or []), *[12] * (WIDTH - len(expected or []))]
        elif op == "release":
            oracle.release(*arguments)
        elif op == "name":
            oracle.named |= set(arguments[0])
        elif op == "unname":
            oracle.named -= set(arguments[0])
        agree(jax.tree.map(lambda leaf, nth=nth: jnp.asarray(leaf[nth]), states), oracle)


@given(several=st.lists(operations(12), min_size=3, max_size=3))
@settings(max_examples=15, deadline=None)
def test_the_same_operations_under_scan_and_vmap(several):
    arrays = [encoded(ops, 12) for ops in several]
    states, ids, ok = jax.tree.map(np.asarray, scanned(arrays[0]))
    agree_all_the_way(several[0], states, ids, ok)
    lanes = jax.tree.map(np.asarray, scanned_together(tuple(map(np.stack, zip(*arrays)))))
    for lane, ops in enumerate(several):
        agree_all_the_way(ops, *jax.tree.map(lambda leaf, lane=lane: leaf[lane], lanes))


IDS = jax.ShapeDtypeStruct((16,), jnp.int32)


@pytest.mark.parametrize(
    "transition",
    [
        lambda state, ids: pool.allocate(state, 3, capacity=16)[0],
        lambda state, ids: pool.acquire(state, ids, 3, capacity=16)[0],
        pool.touch,
        pool.release,
        pool.give_back,
        pool.name,
        pool.unname,
        lambda state, ids: pool.unname_all(state),
        lambda state, ids: pool.compact(state),
    ],
)
def test_transitions_keep_shapes_and_dtypes(transition):
    state = jax.eval_shape(lambda: pool.init(100))
    assert jax.eval_shape(transition, state, IDS) == state


def test_shapes_of_an_allocation_follow_from_its_capacity():
    state = jax.eval_shape(lambda: pool.init(100))
    _, ids, ok = jax.eval_shape(lambda s: pool.allocate(s, 3, capacity=16), state)
    assert (ids.shape, ok.shape) == ((16,), ())


def test_fields_can_be_donated():
    state = pool.init(64)
    jitted = jax.jit(lambda s: pool.allocate(s, 3, capacity=4), donate_argnums=0)
    for _ in range(3):
        state, _, ok = jitted(state)
        assert ok
    assert int(state.num_free) == 63 - 9


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("transition", ["acquire", "release"])
def test_no_transition_copies_the_pool(transition):
    """Work per id must not hide work per block: no pool-sized copy on the way that is always taken."""
    num_blocks = 4099
    state = pool.init(num_blocks)
    ids = jnp.zeros(16, jnp.int32)
    if transition == "acquire":
        function = jax.jit(lambda s, i: pool.acquire(s, i, 5, capacity=16), donate_argnums=0)
    else:
        function = jax.jit(pool.release, donate_argnums=0)
    text = function.lower(state, ids).compile().as_text()
    entry = text[text.index("ENTRY") :]
    sizes = {num_blocks, state.ring.shape[0]}
    copies = [line for line in entry.splitlines() if " copy(" in line and any(f"[{n}]" in line for n in sizes)]
    assert copies == []


def test_ids_outside_the_pool_are_dropped():
    state, ids, _ = pool.allocate(pool.init(4), 2, capacity=2)
    stray = jnp.array([-1, 0, 4, 1 << 30], jnp.int32)
    for change in (pool.release, pool.name, pool.unname, pool.touch):
        after = change(state, stray)
        assert pool.queue(after).tolist() == pool.queue(state).tolist() == [3]
        assert after.ref_count.tolist() == [0, 1, 1, 0]
        assert not after.named.any()
    assert ids.tolist() == [1, 2]


def test_too_small_a_pool():
    for bad in (1, 0, -3, True):
        with pytest.raises(
            ValueError, match="at least 2 blocks, since block 0 is the null block; got num_blocks="
        ):
            pool.init(bad)


def test_broken_states_are_told_apart():
    state, _, _ = pool.allocate(pool.init(6), 2, capacity=2)
    broken = {
        "negative reference counts": state._replace(ref_count=state.ref_count.at[3].set(-1)),
        "counted free": state._replace(cursor=state.cursor.at[2].add(1)),
        "both free and held": state._replace(ref_count=state.ref_count.at[4].set(1)),
        "null block is free, held or named": state._replace(named=state.named.at[0].set(True)),
        "2 queued": state._replace(ring=state.ring.at[3].set(state.ring[2])),
    }
    pool.check_invariants(state)
    for message, bad in broken.items():
        with pytest.raises(RuntimeError, match=message):
            pool.check_invariants(bad)


def test_the_host_handle_counts_and_refuses():
    blocks = BlockPool(6)
    assert (blocks.num_blocks, blocks.num_free, blocks.usage) == (6, 5, 0.0)
    ids = blocks.acquire([], 3)
    assert ids.tolist() == [1, 2, 3]
    assert blocks.acquire([], 3) is None
    assert blocks.acquire([], 2, headroom=1) is None
    assert blocks.acquire([1], 2).tolist() == [4, 5]
    assert blocks.usage == 1.0
    blocks.name([2])
    blocks.release([5, 4, 3, 2, 1])
    assert blocks.queue().tolist() == [5, 4, 3, 2]
    assert blocks.ref_count().tolist() == [0, 1, 0, 0, 0, 0]
    blocks.check_invariants()

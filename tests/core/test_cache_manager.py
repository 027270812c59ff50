"""The KV-cache manager against a tiny oracle, as a state machine; and single behaviours by name."""

from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.hash_index import HashIndex
from jaxcache.core.hashing import BlockHasher, get_request_block_hasher
from jaxcache.core.radix_index import RadixIndex
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup, SlidingWindowSpec, resolve_block_sizes

pytestmark = pytest.mark.core
BLOCK = 4
HASHER = get_request_block_hasher(BLOCK, "sha256", "0")


def make_manager(num_blocks=11, **options) -> KVCacheManager:
    return KVCacheManager([KVCacheGroup(FullAttentionSpec(BLOCK))], num_blocks, 1000, **options)


def admit(manager, request, chunk=None, **options):
    """Look up and allocate as the scheduler does; returns (hit tokens, new ids) or None."""
    blocks, hit = manager.get_computed_blocks(request)
    n = min(chunk or request.num_tokens, request.num_tokens - hit)
    new = manager.allocate_slots(request, n, hit, blocks, **options)
    if new is None:
        return None
    request.num_computed_tokens = hit + n
    request.status = RequestStatus.RUNNING
    return hit, new.get_block_ids()[0]


OPTIONS = st.fixed_dictionaries(
    {
        "num_lookahead_tokens": st.sampled_from([0, 0, 0, 1, 6]),
        "delay_cache_blocks": st.booleans(),
        "full_sequence_must_fit": st.booleans(),
        "reserved_blocks": st.sampled_from([0, 0, 2]),
        "has_scheduled_reqs": st.booleans(),
    }
)
"""What the scheduler, and a user of the manager alone, can ask of an allocation."""


class ManagerMachine(RuleBasedStateMachine):
    """Blocks as entries of a deque, content as tuples of tokens: what the manager must amount to."""

    NUM_BLOCKS = 14
    WATERMARK = 1
    waiting = Bundle("waiting")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.manager = make_manager(self.NUM_BLOCKS, watermark=self.WATERMARK / self.NUM_BLOCKS)
        self.queue = deque(range(1, self.NUM_BLOCKS))
        self.refs = [0] * self.NUM_BLOCKS
        self.content: dict[int, tuple] = {}
        self.tables: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.names: list[int] = []
        """Blocks in the order in which they were named."""
        self.ids = 0

    @rule(
        target=waiting,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        salt=st.sampled_from([None, "s"]),
    )
    def add(self, tokens, salt):
        self.ids += 1
        request = Request(str(self.ids), tokens, cache_salt=salt, block_hasher=HASHER)
        self.requests[request.request_id] = request
        return request

    @rule(target=running, request=consumes(waiting), chunk=st.integers(1, 16), options=OPTIONS)
    def admit(self, request, chunk, options):
        expected = []
        for n in range(BLOCK, request.num_tokens, BLOCK):
            found = [i for i in self.names if self.content[i] == (request.cache_salt, *request.all_token_ids[:n])]
            if not found:
                break
            expected.append(found[0])
        blocks, hit = self.manager.get_computed_blocks(request)
        assert (blocks.get_block_ids(), hit) == ([expected], BLOCK * len(expected))
        n = min(chunk, request.num_tokens - hit)
        got = self.manager.allocate_slots(request, n, hit, blocks, **options)
        watermark = self.WATERMARK if options["has_scheduled_reqs"] else 0
        self.allocate(request, hit + n, got, options, expected, watermark)
        return request

    @rule(request=running, chunk=st.integers(1, 16), options=OPTIONS)
    def go_on(self, request, chunk, options):
        left = request.num_tokens - request.num_computed_tokens
        if request.request_id in self.tables and left:
            n = min(chunk, left)
            got = self.manager.allocate_slots(request, n, **options)
            self.allocate(request, request.num_computed_tokens + n, got, options)

    def allocate(self, request, computed, got, options, hits=(), watermark=0):
        table = [*self.tables.get(request.request_id, []), *hits]
        need = max(0, -(-(computed + options["num_lookahead_tokens"]) // BLOCK) - len(table))
        headroom = watermark + options["reserved_blocks"]
        if options["full_sequence_must_fit"]:
            headroom = max(headroom, watermark + max(0, -(-request.num_tokens // BLOCK) - len(table)) - need)
        if need + headroom + sum(self.refs[i] == 0 for i in hits) > len(self.queue):
            assert got is None
            return
        for i in hits:
            if not self.refs[i]:
                self.queue.remove(i)
            self.refs[i] += 1
        self.tables[request.request_id] = table
        assert got.get_block_ids() == [[self.take(request) for _ in range(need)]]
        if not options["delay_cache_blocks"]:
            self.name(request, computed)
        request.num_computed_tokens = computed
        request.status = RequestStatus.RUNNING

    def take(self, request):
        block = self.queue.popleft()
        self.refs[block] = 1
        self.forget(block)
        self.tables[request.request_id].append(block)
        return block

    def name(self, request, num_tokens):
        for nth, block in enumerate(self.tables[request.request_id][: num_tokens // BLOCK]):
            if block not in self.content:
                self.content[block] = (request.cache_salt, *request.all_token_ids[: (nth + 1) * BLOCK])
                self.names.append(block)

    def forget(self, block):
        if self.content.pop(block, None) is not None:
            self.names.remove(block)

    @rule(request=running, token=st.integers(0, 1))
    def append(self, request, token):
        request.append_output_token_ids(token)

    @rule()
    def decode(self):
        """The last token of all requests that lack nothing else, as a step of decodes allocates it."""
        ready = [
            request
            for name, request in self.requests.items()
            if name in self.tables and request.num_computed_tokens == request.num_tokens - 1
        ]
        lacking = [r for r in ready if r.num_tokens > len(self.tables[r.request_id]) * BLOCK]
        fits = len(lacking) <= len(self.queue)
        assert self.manager.allocate_decodes(ready) == fits
        if not fits:
            return
        for request in lacking:
            self.take(request)
        for request in ready:
            if request.num_tokens % BLOCK == 0:
                self.name(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens

    @rule(request=running, num_tokens=st.integers(0, 30))
    def truncate(self, request, num_tokens):
        table = self.tables.get(request.request_id)
        if table is None:
            return
        if not 0 < num_tokens <= request.num_tokens:
            with pytest.raises(ValueError, match=f"cannot keep {num_tokens} of {request.num_tokens} tokens"):
                self.manager.truncate(request, num_tokens)
            return
        kept, block = min(num_tokens, request.num_computed_tokens), num_tokens // BLOCK
        if num_tokens % BLOCK and block < len(table) and table[block] in self.content:
            kept = min(kept, block * BLOCK)
        assert self.manager.truncate(request, num_tokens) == kept
        request.truncate(num_tokens)
        request.num_computed_tokens = kept
        first_cut = -(-kept // BLOCK)
        self.tables[request.request_id] = table[:first_cut]
        self.release(table[first_cut:])

    @rule(target=waiting, request=consumes(running))
    def preempt(self, request):
        """It is admitted again with the tokens that it has generated."""
        self.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        return request

    @rule(request=consumes(running))
    def finish(self, request):
        self.free(request)
        request.status = RequestStatus.FINISHED_STOPPED
        del self.requests[request.request_id]

    def free(self, request):
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.release(self.tables.pop(request.request_id, []))

    def release(self, blocks):
        nameless = []
        for i in reversed(blocks):
            self.refs[i] -= 1
            if not self.refs[i]:
                (self.queue if i in self.content else nameless).append(i)
        self.queue.extendleft(reversed(nameless))

    @rule(request=running, num_tokens=st.integers(0, 30))
    def uncache(self, request, num_tokens):
        """A step that failed: only blocks that nobody else holds can have been in it."""
        table = self.tables.get(request.request_id, [])
        if any(self.refs[i] > 1 for i in table[num_tokens // BLOCK :]):
            return
        self.manager.uncache(request, num_tokens)
        for i in table[num_tokens // BLOCK :]:
            self.forget(i)
        request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)

    @precondition(lambda self: not any(self.tables.values()))
    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache()
        self.content.clear()
        self.names.clear()

    @precondition(lambda self: any(self.tables.values()))
    @rule()
    def reset_is_refused(self):
        assert not self.manager.reset_prefix_cache()

    @invariant()
    def agrees(self):
        self.manager.check_invariants()
        assert self.manager.pool.queue().tolist() == list(self.queue)
        assert self.manager.pool.num_free == len(self.queue)
        assert sorted(self.names) == np.flatnonzero(self.manager.pool.named()).tolist()

    def teardown(self):
        for manager in self.manager.coordinator.managers:
            for name in list(manager.tables):
                self.manager.free(Request(name, [1]))
        assert self.manager.pool.num_free == self.NUM_BLOCKS - 1


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_prefill_shares_full_blocks_and_evicts_in_the_reference_order():
    manager = make_manager()
    common = list(range(12))
    first = Request("0", [*common, 90, 91], block_hasher=HASHER)
    assert admit(manager, first) == (0, [1, 2, 3, 4])
    second = Request("1", [*common, 80], block_hasher=HASHER)
    assert admit(manager, second) == (12, [5])
    assert manager.pool.ref_count()[1:6].tolist() == [2, 2, 2, 1, 1]
    manager.free(first)
    manager.free(second)
    assert manager.pool.queue().tolist() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    cold = Request("2", range(100, 140), block_hasher=HASHER)
    assert admit(manager, cold) == (0, [5, 4, 6, 7, 8, 9, 10, 3, 2, 1])


def test_the_last_token_is_always_computed():
    manager = make_manager()
    prompt = list(range(8))
    done = Request("0", prompt, block_hasher=HASHER)
    admit(manager, done)
    manager.free(done)
    again = Request("1", prompt, block_hasher=HASHER)
    assert admit(manager, again) == (4, [3])
    assert admit(manager, Request("2", prompt[:1], block_hasher=HASHER)) == (0, [4])


def test_a_failed_allocation_changes_nothing():
    manager = make_manager(num_blocks=6)
    done = Request("0", range(8), block_hasher=HASHER)
    admit(manager, done)
    manager.free(done)
    order = manager.pool.queue().tolist()
    big = Request("1", [*range(8), *range(50, 66)], block_hasher=HASHER)
    assert admit(manager, big) is None
    assert manager.pool.queue().tolist() == order
    assert not manager.pool.ref_count().any()
    assert manager.get_computed_blocks(big)[1] == 8
    manager.check_invariants()
    big.truncate(20)
    assert admit(manager, big) == (8, [3, 4, 5])


def test_names_are_taken_away_once():
    manager = make_manager()
    request = Request("0", range(8), block_hasher=HASHER)
    admit(manager, request)
    manager.evict_blocks([1, 2, 1, 1])
    manager.check_invariants()
    assert manager.get_computed_blocks(Request("1", range(9), block_hasher=HASHER))[1] == 0


def test_a_cut_ends_where_every_group_can_write_on():
    groups = [KVCacheGroup(FullAttentionSpec(size)) for size in (8, 12)]
    manager = KVCacheManager(groups, 40, 100)
    hasher = get_request_block_hasher(4)
    cut, other = (Request(name, range(25), block_hasher=hasher) for name in "ab")
    manager.allocate_slots(cut, 25)
    cut.num_computed_tokens = 25
    assert manager.truncate(cut, 20) == 0
    cut.truncate(20)
    cut.num_computed_tokens = 0
    manager.check_invariants()
    assert manager.get_computed_blocks(other)[1] == 24


def test_low_retention_spares_what_the_latest_admission_found():
    manager = make_manager()
    mine = Request("mine", range(13), cache_retention="low", block_hasher=HASHER)
    admit(manager, mine)
    manager.free(mine)
    other = Request("other", range(13), block_hasher=HASHER)
    admit(manager, other)
    manager.free(other)
    _, found = manager.get_computed_blocks(mine)
    assert found == 12
    admit(manager, mine)
    mine.num_found_tokens = found
    shared = manager.get_block_ids("mine")[0][:3]
    manager.free(mine)
    assert manager.pool.queue().tolist()[-3:] == shared[::-1]


def test_a_decode_without_groups_needs_nothing():
    manager = KVCacheManager([], 2, 100, enable_caching=False)
    request = Request("0", range(5))
    assert manager.allocate_slots(request, 5) is not None
    request.num_computed_tokens = 5
    request.append_output_token_ids(1)
    assert manager.allocate_decodes([request])


def test_blocks_about_to_be_hit_are_not_evicted_by_the_same_allocation():
    manager = make_manager(num_blocks=7)
    done = Request("0", range(12), block_hasher=HASHER)
    admit(manager, done)
    other = Request("x", range(90, 102), block_hasher=HASHER)
    admit(manager, other)
    manager.free(done)
    manager.free(other)
    assert manager.pool.queue().tolist() == [3, 2, 1, 6, 5, 4]
    shares_two = Request("1", [*range(8), *range(60, 76)], block_hasher=HASHER)
    hit, new = admit(manager, shares_two)
    assert hit == 8
    assert new == [3, 6, 5, 4]


def test_unnamed_blocks_are_used_again_before_anything_cached_is_lost():
    manager = make_manager(num_blocks=7)
    kept = Request("0", range(17), block_hasher=HASHER)
    admit(manager, kept)
    manager.free(kept)
    for nth in range(10):
        short = Request(f"s{nth}", [90 + nth, 1, 2], block_hasher=HASHER)
        admit(manager, short)
        manager.free(short)
    assert manager.get_computed_blocks(Request("1", range(17), block_hasher=HASHER))[1] == 16


def test_evicted_content_is_not_found():
    manager = make_manager(num_blocks=4)
    admit(manager, first := Request("0", range(12), block_hasher=HASHER))
    manager.free(first)
    admit(manager, second := Request("1", range(50, 58), block_hasher=HASHER))
    assert manager.get_computed_blocks(Request("2", range(12), block_hasher=HASHER))[1] == 4
    assert manager.num_evicted_blocks == 2
    manager.free(second)


@pytest.mark.parametrize("index", [HashIndex, RadixIndex])
def test_a_colliding_hash_is_no_hit(index):
    """Every block has the same fingerprint; only equal content is taken."""
    hasher = BlockHasher(BLOCK, lambda _: b"x" * 32, b"root")
    manager = make_manager(index=index)
    done = Request("0", range(9), block_hasher=hasher)
    admit(manager, done)
    for tokens, hit in (([*range(9)], 8), ([*range(4), 9, 9, 9, 9, 9], 4), ([9, 1, 2, 3, 4, 5, 6, 7, 8], 0)):
        assert manager.get_computed_blocks(Request("1", tokens, block_hasher=hasher))[1] == hit
    assert (manager.index.num_rejected > 0) == (index is HashIndex)
    salted = Request("2", range(9), cache_salt="s", block_hasher=hasher)
    adapted = Request("3", range(9), adapter="s", block_hasher=hasher)
    assert manager.get_computed_blocks(salted)[1] == manager.get_computed_blocks(adapted)[1] == 0


@pytest.mark.parametrize("index", [HashIndex, RadixIndex])
def test_adapter_and_salt_of_one_spelling_are_kept_apart(index):
    """The reference hashes both as the bare string, so the fingerprints are equal; the records are not."""
    adapted = Request("0", range(9), adapter="x", block_hasher=HASHER)
    salted = Request("1", range(9), cache_salt="x", block_hasher=HASHER)
    assert adapted.block_hashes[0] == salted.block_hashes[0]
    manager = make_manager(index=index)
    admit(manager, adapted)
    assert manager.get_computed_blocks(salted)[1] == 0
    assert (manager.index.num_rejected > 0) == (index is HashIndex)


def test_salts_separate():
    manager = make_manager()
    admit(manager, Request("0", range(12), cache_salt="s1", block_hasher=HASHER))
    for salt, hit in (("s1", 8), ("s2", 0), (None, 0), ("", 0)):
        assert manager.get_computed_blocks(Request("1", range(12), cache_salt=salt, block_hasher=HASHER))[1] == hit


def test_a_salt_reaches_the_first_block_when_decoding_fills_it():
    manager = make_manager()
    short = Request("0", [1, 2, 3], cache_salt="s1", block_hasher=HASHER)
    admit(manager, short)
    short.append_output_token_ids([4, 5])
    manager.allocate_slots(short, 2)
    assert manager.get_computed_blocks(Request("1", [1, 2, 3, 4, 5], block_hasher=HASHER))[1] == 0
    assert manager.get_computed_blocks(Request("2", [1, 2, 3, 4, 5], cache_salt="s1", block_hasher=HASHER))[1] == 4


def test_requests_that_must_compute_all_do_not_read_but_write():
    manager = make_manager()
    admit(manager, Request("0", range(8), prompt_logprobs=1, block_hasher=HASHER))
    assert manager.get_computed_blocks(Request("1", range(8), prompt_logprobs=1, block_hasher=HASHER))[1] == 0
    assert manager.get_computed_blocks(Request("2", range(8), block_hasher=HASHER))[1] == 4
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1 + 0, 8, 4)


def test_with_caching_off_nothing_is_looked_up_or_shared():
    manager = make_manager(enable_caching=False)
    for name in ("0", "1"):
        assert admit(manager, Request(name, range(8)))[0] == 0
    assert len(manager.index) == 0
    assert manager.make_prefix_cache_stats().requests == 0
    assert admit(manager, Request("2", range(100))) is None


def test_duplicates_are_kept_and_the_first_is_found():
    manager = make_manager()
    a, b = (Request(name, range(9), skip_reading_prefix_cache=True, block_hasher=HASHER) for name in "ab")
    admit(manager, a)
    admit(manager, b)
    probe = Request("c", range(9), block_hasher=HASHER)
    assert manager.get_computed_blocks(probe)[0].get_block_ids() == [[1, 2]]
    manager.evict_blocks([1])
    assert manager.get_computed_blocks(probe)[0].get_block_ids() == [[4, 2]]
    manager.check_invariants()


def test_watermark_and_whole_sequence_admission():
    manager = make_manager(num_blocks=11, watermark=0.2)
    request = Request("0", range(36), block_hasher=HASHER)
    assert admit(manager, request) is None
    assert admit(manager, request, has_scheduled_reqs=False) == (0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.free(request)
    waiting = Request("1", range(100, 148), block_hasher=HASHER)
    assert admit(manager, waiting, 4, full_sequence_must_fit=True, has_scheduled_reqs=False) is None
    assert admit(manager, waiting, 4, has_scheduled_reqs=False) is not None


def test_statistics_count_tokens_and_keep_preempted_requests_apart():
    manager = make_manager()
    request = Request("0", range(10), block_hasher=HASHER)
    admit(manager, request)
    manager.free(request)
    request.num_preemptions = 1
    manager.get_computed_blocks(request)
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 10, 0)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 8)
    assert manager.make_prefix_cache_stats().queries == 0
    assert make_manager(log_stats=False).make_prefix_cache_stats() is None


def test_block_sizes_of_several_groups():
    groups = (KVCacheGroup(FullAttentionSpec(6)), KVCacheGroup(SlidingWindowSpec(9, 9)))
    assert resolve_block_sizes(groups) == (18, 3)
    assert resolve_block_sizes(groups, 1) == (18, 1)
    assert resolve_block_sizes(()) == (1, 1)
    with pytest.raises(
        ValueError, match=r"hash_block_size 2 does not divide the block sizes \[9\]: choose a divisor of 3"
    ):
        resolve_block_sizes(groups, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttentionSpec(0), "FullAttentionSpec.block_size must be a positive integer, got 0"),
        (lambda: SlidingWindowSpec(4, 0), "SlidingWindowSpec.sliding_window must be a positive integer"),
        (lambda: make_manager(watermark=1.0), r"watermark must lie in \[0, 1\), got 1.0"),
        (lambda: make_manager(1), "at least 2 blocks"),
        (lambda: make_manager(eviction_policy="fifo"), "eviction_policy must be one of lru, s3fifo, got 'fifo'"),
        (lambda: KVCacheManager([], 5, 100), "prefix caching needs at least one KV-cache group"),
        (lambda: make_manager().allocate_slots(Request("0", [1]), 0), "num_new_tokens must be positive, got 0"),
        (lambda: make_manager().evict_blocks([0, 11]), r"block ids \[0, 11\] are not in \[1, 11\)"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_no_groups_and_no_caching():
    manager = KVCacheManager([], 2, 100, enable_caching=False)
    assert admit_nothing(manager) == 0


def admit_nothing(manager) -> int:
    return manager.get_computed_blocks(Request("0", [1, 2]))[1]

"""The radix index beside the hash index: the same hits, block ids, evictions, names and events."""

import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.events import KVEventsConfig
from jaxcache.core.hash_index import HashIndex
from jaxcache.core.hashing import MultiModalFeature, get_request_block_hasher
from jaxcache.core.radix_index import RadixIndex
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup, RecurrentSpec, SlidingWindowSpec

pytestmark = pytest.mark.core
RUNS = int(os.environ.get("INDEX_MACHINE_RUNS", "60"))
GROUPS = [
    [FullAttentionSpec(4)],
    [FullAttentionSpec(4), SlidingWindowSpec(4, 7)],
    [FullAttentionSpec(8), SlidingWindowSpec(4, 9)],
    [FullAttentionSpec(4), FullAttentionSpec(4), RecurrentSpec(4)],
]
EMBEDS = [np.arange(80, dtype=np.float32).reshape(20, 4), np.ones((20, 4), np.float32)]


def test_run_numbers_are_used_again():
    manager = KVCacheManager([KVCacheGroup(FullAttentionSpec(4))], 20, 100)
    hasher = get_request_block_hasher(4)
    for nth in range(300):
        request = Request(str(nth), [nth % 7, nth, 3, 4, nth % 5, 6, 7, 8, 9], block_hasher=hasher)
        hits, num_hits = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 9 - num_hits, num_hits, hits)
        manager.free(request)
        manager.check_invariants()
    assert max(manager.index._runs) < 20


class Pair(RuleBasedStateMachine):
    """Two managers that differ in nothing but the index, told the same."""

    @initialize(specs=st.sampled_from(GROUPS), num_blocks=st.integers(8, 40), events=st.booleans())
    def start(self, specs, num_blocks, events):
        self.managers = [
            KVCacheManager(
                [KVCacheGroup(spec) for spec in specs],
                num_blocks,
                1000,
                events=KVEventsConfig(enable_kv_cache_events=True) if events else None,
                index=index,
            )
            for index in (HashIndex, RadixIndex)
        ]
        self.hasher = get_request_block_hasher(self.managers[0].hash_block_size, "xxhash", "0")
        self.only_full = all(isinstance(spec, FullAttentionSpec) for spec in specs)
        self.running: list[tuple[Request, Request]] = []
        self.count = 0

    def both(self, what):
        """What both managers answer, which must be the same."""
        mine, theirs = (what(manager) for manager in self.managers)
        assert repr(mine) == repr(theirs)
        return theirs

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        repeat=st.integers(1, 2),
        kind=st.sampled_from(["plain"] * 4 + ["salt", "adapter", "both", "image", "embeds"]),
        chunk=st.integers(1, 60),
    )
    def admit(self, tokens, repeat, kind, chunk):
        tokens = tokens * repeat
        extra = {}
        if kind in ("salt", "both"):
            extra["cache_salt"] = "x"
        if kind in ("adapter", "both"):
            extra["adapter"], extra["adapter_id"] = "y", 1  # not "x": fingerprints would be those of the salt
        if kind == "image" and len(tokens) > 6:
            extra["features"] = [MultiModalFeature(f"image {tokens[0]}", 3, min(6, len(tokens) - 3))]
        if kind == "embeds" and len(tokens) <= 20:
            extra["prompt_embeds"] = EMBEDS[tokens[0]][: len(tokens)]
        self.count += 1
        pair = tuple(Request(str(self.count), tokens, block_hasher=self.hasher, **extra) for _ in self.managers)

        def admit_to(manager):
            request = pair[self.managers.index(manager)]
            manager.new_step_starts()
            blocks, hit = manager.get_computed_blocks(request)
            new = manager.allocate_slots(request, min(chunk, request.num_tokens - hit), hit, blocks)
            if new is not None:
                request.num_computed_tokens = hit + min(chunk, request.num_tokens - hit)
                request.status = RequestStatus.RUNNING
            return hit, blocks.get_block_ids(), new and new.get_block_ids()

        if self.both(admit_to)[2] is not None:
            self.running.append(pair)

    @rule(nth=st.integers(0, 50), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def go_on(self, nth, tokens):
        if not self.running:
            return
        pair = self.running[nth % len(self.running)]
        if pair[0].num_computed_tokens == pair[0].num_tokens:
            for request in pair:
                request.append_output_token_ids(tokens)

        def allocate(manager):
            request = pair[self.managers.index(manager)]
            manager.new_step_starts()
            n = min(len(tokens), request.num_tokens - request.num_computed_tokens)
            new = manager.allocate_slots(request, n)
            if new is not None:
                request.num_computed_tokens += n
            return new and new.get_block_ids()

        self.both(allocate)

    @rule(nth=st.integers(0, 50))
    def finish(self, nth):
        if self.running:
            pair = self.running.pop(nth % len(self.running))
            self.both(lambda manager: manager.free(pair[0]))

    @rule(nth=st.integers(0, 50), kept=st.floats(0, 1))
    def lose_a_step(self, nth, kept):
        if self.running:
            pair = self.running[nth % len(self.running)]
            self.both(lambda manager: manager.uncache(pair[0], int(kept * pair[0].num_computed_tokens)))

    @rule(nth=st.integers(0, 50), kept=st.floats(0, 1))
    def truncate(self, nth, kept):
        if self.running and self.only_full:
            pair = self.running[nth % len(self.running)]
            num_tokens = max(1, int(kept * pair[0].num_tokens))
            num_computed = self.both(
                lambda manager: manager.truncate(pair[self.managers.index(manager)], num_tokens)
            )
            for request in pair:
                request.truncate(num_tokens)
                request.num_computed_tokens = num_computed

    @rule(ids=st.lists(st.integers(1, 7), max_size=4, unique=True))
    def evict(self, ids):
        self.both(lambda manager: manager.evict_blocks(ids))

    @rule()
    def reset(self):
        self.both(lambda manager: manager.reset_prefix_cache())

    @invariant()
    def same(self):
        if not hasattr(self, "managers"):
            return
        self.both(lambda manager: manager.pool.queue().tolist())
        self.both(lambda manager: manager.pool.named().tolist())
        self.both(lambda manager: len(manager.index))
        self.both(lambda manager: manager.num_evicted_blocks)
        self.both(lambda manager: manager.take_events())
        self.both(lambda manager: sorted(manager.index.keys()))
        for manager in self.managers:
            manager.check_invariants()


Pair.TestCase.settings = settings(max_examples=RUNS, stateful_step_count=40, deadline=None)
TestPair = Pair.TestCase


def manager_of(num_blocks=100) -> KVCacheManager:
    return KVCacheManager([KVCacheGroup(FullAttentionSpec(4))], num_blocks, 1000)


def admit(manager, name, tokens):
    request = Request(name, tokens)
    blocks, hit = manager.get_computed_blocks(request)
    manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
    request.num_computed_tokens, request.status = request.num_tokens, RequestStatus.RUNNING
    return request, hit


def test_content_that_is_gone_takes_no_memory():
    """Prompts that share a beginning come and go through a small pool: what is spelled stays bounded by it."""
    manager = manager_of(20)
    for nth in range(200):
        request, _ = admit(manager, str(nth), [0, 1, 2, 3, *range(nth, nth + 30)])
        manager.free(request)
    assert sum(len(run.tokens) for run in manager.index._runs.values()) <= 19 * 16
    assert len(manager.index._runs) <= 19
    manager.check_invariants()


def test_a_generated_text_is_one_run():
    manager = manager_of()
    request, _ = admit(manager, "0", range(9))
    for token in range(200):
        request.append_output_token_ids(token)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    assert len(manager.index._runs) == 1
    assert len(manager.index) == 209 // 4
    assert admit(manager, "1", [*range(9), *range(200)])[1] == 208


def test_a_run_that_nobody_branches_from_any_more_is_one_again():
    manager = manager_of()
    first, _ = admit(manager, "0", range(33))
    second, hit = admit(manager, "1", [*range(16), *range(100, 120)])
    assert hit == 16
    assert len(manager.index._runs) == 3
    manager.free(second)
    ids = [i for i in range(1, 100) if manager.index.is_named(i) and i not in manager.get_block_ids("0")[0]]
    manager.evict_blocks(ids)
    assert len(manager.index._runs) == 1
    manager.free(first)
    manager.check_invariants()


def test_requests_without_a_hasher_are_served():
    """Look-ups need no fingerprint; whoever asks for one is told what is missing."""
    manager = manager_of()
    admit(manager, "0", range(9))
    assert admit(manager, "1", range(9))[1] == 8
    with pytest.raises(ValueError, match="fingerprints need requests with a block_hasher"):
        list(manager.index.keys())

"""Events against the reference's recorded bytes, and a mirror fed by nothing but events against the index."""

import gzip
import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventsConfig, wire
from jaxcache.core.hashing import BlockHasher, get_hash_function, get_request_block_hasher
from jaxcache.core.request import Request
from jaxcache.core.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.core
GOLDEN = json.loads(gzip.decompress((Path(__file__).parents[1] / "data/events.json.gz").read_bytes()))
ON = KVEventsConfig(enable_kv_cache_events=True)
EVENTS = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
SAMPLES = [sample for sample in GOLDEN["samples"] if isinstance(sample["decoded"], dict)]


FULL = (FullAttentionSpec(4),)


def make_manager(num_blocks=6, events=ON, groups=FULL):
    return KVCacheManager([KVCacheGroup(spec) for spec in groups], num_blocks, 1000, events=events)


def admit(manager, request):
    hits, num_hits = manager.get_computed_blocks(request)
    return manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, hits)


def from_golden(value):
    """A recorded value: bytes were written down as hex."""
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes_hex"])
    return [from_golden(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["name"])
def test_single_events_have_the_reference_bytes(sample):
    values = {name: from_golden(value) for name, value in sample["decoded"].items()}
    kind = EVENTS[values.pop("type")]
    assert msgspec.msgpack.encode(wire(kind(**values))).hex() == sample["msgpack_hex"]


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("stream", GOLDEN["streams"], ids=lambda s: "int" if s["int_hashes"] else "bytes")
def test_a_managers_stream_has_the_reference_bytes(stream, duplicates):
    manager = make_manager(
        events=KVEventsConfig(
            enable_kv_cache_events=True,
            int_block_hashes=stream["int_hashes"],
            report_duplicate_removals=duplicates,
        )
    )
    hasher = BlockHasher(4, get_hash_function("sha256"), bytes(range(32)))
    first = Request("a", range(1, 15), adapter="my-lora", adapter_id=7, cache_salt="s", block_hasher=hasher)
    admit(manager, first)
    first.num_computed_tokens = 14
    first.append_output_token_ids([50, 51])
    manager.allocate_slots(first, 2)
    manager.free(first)
    second = Request("b", range(100, 116), block_hasher=hasher)
    admit(manager, second)
    manager.free(second)
    assert manager.reset_prefix_cache()
    events = manager.take_events()
    assert [type(event).__name__ for event in events] == stream["order"]
    assert msgspec.msgpack.encode([1.5, [wire(event) for event in events], 0]).hex() == stream["batch_hex"]
    assert manager.take_events() == []


def test_off_by_default():
    manager = make_manager(events=None)
    admit(manager, Request("a", range(9), block_hasher=get_request_block_hasher(4)))
    assert manager.take_events() == []
    assert KVEventsConfig().enable_kv_cache_events is False


@pytest.mark.parametrize(("duplicates", "removals"), [(False, 0), (True, 1)])
def test_a_content_that_another_block_serves_counts_as_removed_only_on_demand(duplicates, removals):
    """A full hit computes its last block anew, so the same content then stands in two blocks."""
    config = KVEventsConfig(enable_kv_cache_events=True, report_duplicate_removals=duplicates)
    manager = make_manager(num_blocks=8, events=config)
    hasher = get_request_block_hasher(4)
    for name in "ab":
        request = Request(name, range(8), block_hasher=hasher)
        blocks = admit(manager, request)
        manager.free(request)
    assert [type(e) for e in manager.take_events()] == [BlockStored, BlockStored]
    manager.evict_blocks([int(blocks.blocks[0][-1])])
    assert manager.get_computed_blocks(Request("c", range(9), block_hasher=hasher))[1] == 8
    assert len(manager.take_events()) == removals
    manager.evict_blocks(range(1, 8))
    gone = [event for event in manager.take_events() if isinstance(event, BlockRemoved)]
    assert len(gone) == 2


def test_both_copies_of_a_content_evicted_in_one_go_are_one_removal():
    manager = make_manager(num_blocks=8)
    hasher = get_request_block_hasher(4)
    for name in "ab":
        request = Request(name, range(4), block_hasher=hasher)
        admit(manager, request)
        manager.free(request)
    manager.take_events()
    manager.evict_blocks([1, 2])
    assert len(manager.take_events()) == 1


def test_groups_are_told_apart():
    manager = make_manager(
        20, groups=(FullAttentionSpec(4), SlidingWindowSpec(4, 8), ChunkedLocalAttentionSpec(4, 8))
    )
    admit(manager, Request("a", range(8), block_hasher=get_request_block_hasher(4)))
    stored = manager.take_events()
    assert [(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored] == [
        (0, "full_attention", None),
        (1, "sliding_window", 8),
        (2, "chunked_local_attention", None),
    ]


def test_a_coarse_block_lists_each_extra_key_once():
    manager = make_manager(20, groups=(FullAttentionSpec(4), FullAttentionSpec(8)))
    hasher = get_request_block_hasher(4)
    admit(manager, Request("a", range(17), adapter="x", cache_salt="s", block_hasher=hasher))
    fine, coarse = manager.take_events()
    assert fine.extra_keys == [("x", "s"), ("x",), ("x",), ("x",)]
    assert coarse.extra_keys == [("x", "s"), ("x",)]
    assert coarse.block_hashes == fine.block_hashes[1::2]


@pytest.mark.parametrize("name", ["buffer_steps", "hwm", "max_queue_size"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=f"KVEventsConfig.{name} must be an integer of at least 1, got 0"):
        KVEventsConfig(**{name: 0})


class Mirror:
    """What somebody who hears only events knows: the contents of each group, as a set."""

    def __init__(self):
        self.keys = set()

    def hear(self, events):
        for event in events:
            match event:
                case BlockStored():
                    self.keys |= {(key, event.group_idx) for key in event.block_hashes}
                case BlockRemoved():
                    gone = {(key, event.group_idx) for key in event.block_hashes}
                    assert gone <= self.keys
                    self.keys -= gone
                case AllBlocksCleared():
                    self.keys.clear()


@pytest.mark.parametrize("seed", range(3))
def test_the_parent_of_a_stored_block_is_known_and_a_mirror_knows_the_index(seed):
    rng = np.random.default_rng(seed)
    config = KVEventsConfig(enable_kv_cache_events=True, int_block_hashes=False)
    manager = make_manager(40, events=config)
    hasher, mirror, running, seen = get_request_block_hasher(4), Mirror(), [], Counter()
    for nth in range(1000):
        action = rng.integers(40)
        if action < 20:
            prompt = rng.integers(0, 2, rng.integers(1, 40))
            request = Request(str(nth), prompt, block_hasher=hasher)
            if admit(manager, request) is not None:
                request.num_computed_tokens = request.num_tokens
                running.append(request)
        elif action < 39 and running:
            request = running.pop(rng.integers(len(running)))
            if action < 24:
                manager.uncache(request, int(rng.integers(request.num_tokens)))
            manager.free(request)
        elif action == 39:
            while running:
                manager.free(running.pop())
            manager.reset_prefix_cache()
        for event in manager.take_events():
            seen[type(event)] += 1
            if isinstance(event, BlockStored) and event.parent_block_hash is not None:
                assert (event.parent_block_hash, event.group_idx) in mirror.keys
            mirror.hear([event])
        assert {key + group.to_bytes(4, "big") for key, group in mirror.keys} == set(manager.index.keys())
    assert min(seen[kind] for kind in EVENTS.values()) > 5

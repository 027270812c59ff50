"""Hits that several groups must agree on, against brute force; and what each kind of group needs and keeps."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.config import SchedulerConfig
from jaxcache.core.coordinator import HybridKVCacheCoordinator, make_coordinator
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.managers import ChunkedLocalAttentionManager, SlidingWindowManager
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.scheduler import Scheduler
from jaxcache.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MLAAttentionSpec,
    RecurrentSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    resolve_block_sizes,
)

pytestmark = pytest.mark.core


class Residency:
    """An index that holds what it is told: for each group, whether the block at a position is there."""

    def __init__(self, present: list[list[bool]]) -> None:
        self.present = present
        self.lookups: Counter[tuple[int, int]] = Counter()

    def most_lookups(self) -> int:
        """Of any block."""
        return max(self.lookups.values(), default=0)

    def _block(self, group, position):
        return 1 + 100 * group + position

    def resident(self, request, group_ids, num_blocks):
        for group in group_ids:
            self.lookups.update((group, position) for position in range(num_blocks))
        return np.array(
            [[self._block(g, i) if self.present[g][i] else 0 for i in range(num_blocks)] for g in group_ids],
            np.int32,
        ).reshape(len(group_ids), num_blocks)


def serves(spec: KVCacheSpec, present: list[bool], num_tokens: int) -> bool:
    """Whether a group can go on from `num_tokens` tokens: it has what the next token reaches back to."""
    size = spec.block_size
    match spec:
        case FullAttentionSpec():
            needed = range(num_tokens // size)
        case SlidingWindowSpec():
            first = max(0, num_tokens - spec.sliding_window + 1) // size
            needed = range(first, num_tokens // size)
        case ChunkedLocalAttentionSpec():
            first = num_tokens // spec.attention_chunk_size * spec.attention_chunk_size // size
            needed = range(first, num_tokens // size)
        case RecurrentSpec():
            needed = range(max(0, num_tokens // size - 1), num_tokens // size)
    return all(present[i] for i in needed)


SPECS = [
    FullAttentionSpec(4),
    FullAttentionSpec(8),
    SlidingWindowSpec(4, 9),
    SlidingWindowSpec(4, 13),
    SlidingWindowSpec(8, 20),
    RecurrentSpec(4),
    RecurrentSpec(8),
]
NUM_TOKENS = 64


@st.composite
def scenes(draw):
    specs = draw(st.lists(st.sampled_from(SPECS), min_size=2, max_size=4))
    present = [
        draw(
            st.lists(
                st.integers(0, 4).map(bool),
                min_size=NUM_TOKENS // s.block_size,
                max_size=NUM_TOKENS // s.block_size,
            )
        )
        for s in specs
    ]
    return specs, present, draw(st.integers(0, NUM_TOKENS))


def find(specs, present, max_length):
    groups = [KVCacheGroup(spec) for spec in specs]
    index = Residency(present)
    alignment, _ = resolve_block_sizes(groups)
    coordinator = make_coordinator(
        groups,
        index,
        enable_caching=True,
        scheduler_block_size=alignment,
        max_model_len=1000,
        max_num_batched_tokens=64,
    )
    return coordinator.find_longest_cache_hit(Request("r", range(NUM_TOKENS)), max_length), alignment, index


@given(scene=scenes())
@settings(max_examples=300, deadline=None)
def test_the_hit_is_the_longest_that_every_group_serves(scene):
    specs, present, max_length = scene
    hit, alignment, _ = find(specs, present, max_length)
    possible = [
        n for n in range(0, max_length + 1, alignment) if all(map(serves, specs, present, [n] * len(specs)))
    ]
    assert hit.num_tokens == possible[-1]
    for nth, (spec, blocks) in enumerate(zip(specs, hit.blocks)):
        assert len(blocks) == hit.num_tokens // spec.block_size
        assert all(b in (0, 1 + 100 * nth + position) for position, b in enumerate(blocks))
        assert serves(spec, [b > 0 for b in blocks], hit.num_tokens)
        assert all(present[nth][position] for position, b in enumerate(blocks) if b)
    assert (hit.limiting_group is not None) == (max_length - hit.num_tokens >= alignment)


@given(scene=scenes(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_order_of_groups_does_not_matter_and_a_hit_confirms_itself(scene, data):
    specs, present, max_length = scene
    hit, *_ = find(specs, present, max_length)
    order = data.draw(st.permutations(range(len(specs))))
    shuffled, *_ = find([specs[i] for i in order], [present[i] for i in order], max_length)
    assert shuffled.num_tokens == hit.num_tokens
    assert find(specs, present, hit.num_tokens)[0].num_tokens == hit.num_tokens


@given(scene=scenes())
@settings(max_examples=300, deadline=None)
def test_each_block_is_looked_up_once(scene):
    specs, present, max_length = scene
    _, _, index = find(specs, present, max_length)
    assert index.most_lookups() <= 1


def test_groups_that_disagree_all_the_way_down():
    """Two windows that each lack what the other has, all the way down."""
    specs = [SlidingWindowSpec(4, 5), SlidingWindowSpec(4, 9)]
    present = [[i % 2 == 0 for i in range(16)], [i % 4 in (1, 2) for i in range(16)]]
    present[1][:1] = [True]
    hit, _, index = find(specs, present, 64)
    assert hit.num_tokens == 60
    present[0] = [i % 4 == 1 for i in range(16)]
    hit, _, index = find(specs, present, 64)
    assert hit.num_tokens == 8
    assert index.most_lookups() == 1


def test_the_limiting_group_is_named():
    specs = [FullAttentionSpec(4), SlidingWindowSpec(4, 9), RecurrentSpec(4)]
    present = [[True] * 16 for _ in specs]
    assert find(specs, present, 64)[0].limiting_group is None
    present[2] = [False] * 16
    hit, *_ = find(specs, present, 64)
    assert (hit.num_tokens, hit.limiting_group) == (0, 2)
    present[2][5] = True
    assert find(specs, present, 64)[0].num_tokens == 24


def test_a_state_kept_each_eight_tokens_still_serves():
    """Prompts share 12 tokens and states lie at multiples of 8: the hit is 8, not 0."""
    specs = [FullAttentionSpec(4), RecurrentSpec(4)]
    present = [[True] * 3 + [False] * 13, [False, True, False, True] * 4]
    assert find(specs, present, 18)[0].num_tokens == 8


@pytest.mark.parametrize(
    ("present", "max_length", "hit"),
    [
        ([1, 1, 0, 1, 0, 1, 1, 1], 16, 16),
        ([1, 1, 0, 1, 1, 0, 1, 0], 16, 10),
        ([1, 0, 0, 0, 0, 0, 0, 0], 16, 2),
        ([0, 0, 0, 0, 0, 0, 0, 0], 16, 0),
        ([1, 1, 0, 0, 0, 0, 0, 1], 16, 4),
        ([0, 1, 1, 1, 1, 0, 0, 0], 16, 10),
        ([0, 1, 1, 1, 1, 0, 0, 0], 9, 8),
        ([1, 1, 1, 1, 1, 1, 1, 1], 7, 6),
    ],
)
def test_window_hits(present, max_length, hit):
    """Window 4, blocks of 2: a hit needs the two blocks before its end, or all from the first on."""
    manager = SlidingWindowManager(
        SlidingWindowSpec(2, 4),
        0,
        Residency([list(map(bool, present))]),
        alignment=2,
        max_model_len=99,
        max_num_batched_tokens=9,
    )
    assert 2 * manager.find_longest_cache_hit(Request("r", range(16)), [0], max_length).shape[1] == hit


@pytest.mark.parametrize(
    ("present", "max_length", "hit"),
    [
        ([0], 1, 0),
        ([1], 2, 2),
        ([0, 1], 4, 4),
        ([1, 0], 4, 4),
        ([0, 0, 1], 6, 6),
        ([1, 1, 0, 1], 7, 4),
        ([0] * 8 + [0], 18, 16),
        ([0] * 8 + [1], 18, 18),
    ],
)
def test_chunked_local_hits(present, max_length, hit):
    """Chunks of 4, blocks of 2: blocks of earlier chunks are not needed."""
    manager = ChunkedLocalAttentionManager(
        ChunkedLocalAttentionSpec(2, 4),
        0,
        Residency([list(map(bool, present))]),
        alignment=2,
        max_model_len=99,
        max_num_batched_tokens=9,
    )
    assert 2 * manager.find_longest_cache_hit(Request("r", range(20)), [0], max_length).shape[1] == hit


# What groups keep


def make_scheduler(specs, num_blocks=60, max_num_batched_tokens=16, **options):
    kv = KVCacheManager(
        [KVCacheGroup(spec) for spec in specs],
        num_blocks,
        400,
        max_num_batched_tokens=max_num_batched_tokens,
        **options,
    )
    return Scheduler(kv, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens))


def make_request(scheduler, name, tokens, max_tokens=1):
    hasher = get_request_block_hasher(scheduler.kv.hash_block_size, "sha256", "0")
    return Request(name, tokens, max_tokens=max_tokens, block_hasher=hasher)


def step(scheduler):
    plan = scheduler.schedule()
    scheduler.commit(plan)
    for entry in plan.scheduled:
        if entry.samples:
            entry.request.append_output_token_ids(7)
            if entry.request.num_output_tokens >= entry.request.max_tokens:
                scheduler.finish(entry.request, RequestStatus.FINISHED_LENGTH)
    scheduler.kv.check_invariants()
    return [(entry.request.request_id, entry.start, entry.stop) for entry in plan.scheduled]


def run(scheduler):
    steps = []
    while scheduler.has_unfinished:
        steps.append(step(scheduler))
        assert len(steps) < 500
    assert scheduler.kv.num_held == 0
    return steps


def test_a_window_keeps_only_what_it_reaches_back_to():
    """However long the text: window / block size + 2 blocks."""
    scheduler = make_scheduler([FullAttentionSpec(4), SlidingWindowSpec(4, 12)], num_blocks=120)
    request = make_request(scheduler, "a", range(8), max_tokens=200)
    scheduler.add_request(request)
    most = 0
    while scheduler.has_unfinished:
        step(scheduler)
        window = scheduler.kv.coordinator.managers[1].block_ids("a")
        most = max(most, np.count_nonzero(window))
    assert most <= 12 // 4 + 2
    assert most >= 12 // 4


def test_a_longer_prompt_hits_what_a_window_kept():
    scheduler = make_scheduler([FullAttentionSpec(4), SlidingWindowSpec(4, 8)])
    scheduler.add_request(make_request(scheduler, "a", range(40)))
    run(scheduler)
    second = make_request(scheduler, "b", [*range(40), 90, 91])
    scheduler.add_request(second)
    step(scheduler)
    assert second.num_cached_tokens == 40
    scheduler.add_request(third := make_request(scheduler, "c", [*range(20), 90, 91]))
    step(scheduler)
    assert third.num_cached_tokens == 20


def test_only_blocks_that_can_serve_a_hit_get_a_name():
    """Hits end at multiples of 16, and a window of 5 needs one block of 4 before each."""
    scheduler = make_scheduler(
        [FullAttentionSpec(16), SlidingWindowSpec(4, 5)], num_blocks=90, max_num_batched_tokens=64
    )
    scheduler.add_request(make_request(scheduler, "a", range(40)))
    plan = scheduler.schedule()
    manager = scheduler.kv.coordinator.managers[1]
    named = [
        position for position, block in enumerate(manager.block_ids("a")) if scheduler.kv.index.is_named(block)
    ]
    assert named == [3, 7]
    scheduler.commit(plan)


def test_recurrent_layers_are_computed_in_whole_blocks_and_leave_a_state_at_the_last_one():
    scheduler = make_scheduler([FullAttentionSpec(4), RecurrentSpec(4)])
    scheduler.add_request(make_request(scheduler, "a", range(39), max_tokens=3))
    assert run(scheduler) == [
        [("a", 0, 16)],
        [("a", 16, 32)],
        [("a", 32, 36)],
        [("a", 36, 39)],
        [("a", 39, 40)],
        [("a", 40, 41)],
    ]
    longer = make_request(scheduler, "b", [*range(39), 90], max_tokens=3)
    scheduler.add_request(longer)
    assert step(scheduler) == [("b", 36, 40)]
    state = scheduler.kv.coordinator.managers[1].block_ids("b")
    assert np.count_nonzero(state) == 2
    diverges = make_request(scheduler, "c", [*range(34), 90, 91])
    scheduler.add_request(diverges)
    step(scheduler)
    assert diverges.num_cached_tokens == 32


def test_a_state_that_this_step_computes_is_waited_for():
    """Full attention may share within a step, since KV is written before it is read; a state may not."""
    scheduler = make_scheduler([FullAttentionSpec(4), RecurrentSpec(4)], max_num_batched_tokens=64)
    for name in "ab":
        scheduler.add_request(make_request(scheduler, name, [*range(16), ord(name)], max_tokens=1))
    assert step(scheduler) == [("a", 0, 16)]
    assert step(scheduler) == [("a", 16, 17), ("b", 16, 17)]
    run(scheduler)


def test_recurrent_state_takes_two_blocks_however_long_the_text():
    scheduler = make_scheduler([RecurrentSpec(4), FullAttentionSpec(4)], num_blocks=120)
    scheduler.add_request(make_request(scheduler, "a", range(100), max_tokens=50))
    while scheduler.has_unfinished:
        step(scheduler)
        assert np.count_nonzero(scheduler.kv.coordinator.managers[0].block_ids("a")) <= 2


def test_latent_kv_is_kept_as_any_other():
    scheduler = make_scheduler([MLAAttentionSpec(4)])
    for name, hit in (("a", 0), ("b", 8)):
        request = make_request(scheduler, name, range(10))
        scheduler.add_request(request)
        run(scheduler)
        assert request.num_cached_tokens == hit


def test_cross_attention_takes_what_the_encoder_needs_and_is_never_cached():
    scheduler = make_scheduler([FullAttentionSpec(4), CrossAttentionSpec(4)], enable_caching=False)
    request = make_request(scheduler, "a", range(4), max_tokens=20)
    cross = scheduler.kv.coordinator.managers[1]
    cross.num_encoder_tokens["a"] = 10
    scheduler.add_request(request)
    step(scheduler)
    assert len(cross.block_ids("a")) == 3
    run(scheduler)
    assert cross.num_encoder_tokens == {}
    with pytest.raises(ValueError, match="cross attention is never cached: switch enable_prefix_caching off"):
        make_scheduler([FullAttentionSpec(4), CrossAttentionSpec(4)])


def test_attention_sinks_have_blocks_of_their_own():
    scheduler = make_scheduler([SinkFullAttentionSpec(4, 8)], num_blocks=10)
    assert scheduler.kv.sink_blocks[0].tolist() == [1, 2]
    assert (scheduler.kv.num_usable, scheduler.kv.num_held) == (7, 0)
    request = make_request(scheduler, "a", range(10))
    scheduler.add_request(request)
    run(scheduler)
    assert scheduler.kv.reset_prefix_cache()
    with pytest.raises(ValueError, match="40 tokens need 10 blocks, but the pool has 7 usable ones"):
        scheduler.add_request(make_request(scheduler, "b", range(40)))
    with pytest.raises(ValueError, match="80 sink tokens take 20 blocks, but the pool has 9 free ones"):
        make_scheduler([SinkFullAttentionSpec(4, 80)], num_blocks=10)
    with pytest.raises(ValueError, match="sink_len 6 is not a multiple of the block size 4"):
        SinkFullAttentionSpec(4, 6)


def test_a_chunk_that_begins_inside_a_block_keeps_it():
    """Chunks of 6, blocks of 4: token 8 attends to 6 and 7, which are in the second block."""
    spec = ChunkedLocalAttentionSpec(4, 6)
    scheduler = make_scheduler([spec], max_num_batched_tokens=4)
    for name in ("a", "b"):
        request = make_request(scheduler, name, range(9), max_tokens=3)
        scheduler.add_request(request)
        step(scheduler)
        if name == "b":
            assert request.num_cached_tokens == 8
            assert [block > 0 for block in scheduler.kv.get_block_ids(name)[0]] == [False, True, True]
        run(scheduler)
    assert spec.max_blocks(12, 4) == 4


def test_states_are_found_by_those_who_do_not_speak_of_steps():
    kv = KVCacheManager([KVCacheGroup(RecurrentSpec(4))], 10, 100)
    hasher = get_request_block_hasher(4)
    first, second = (Request(name, range(9), block_hasher=hasher) for name in "ab")
    for num_tokens in (8, 1):
        assert kv.allocate_slots(first, num_tokens) is not None
        first.num_computed_tokens += num_tokens
    hits, num_hits = kv.get_computed_blocks(second)
    assert num_hits == 8
    assert kv.allocate_slots(second, 1, num_hits, hits) is not None
    kv.check_invariants()


def test_a_first_chunk_without_a_state_to_keep_leaves_no_name():
    kv = KVCacheManager([KVCacheGroup(RecurrentSpec(4))], 10, 100)
    request = Request("a", range(9), block_hasher=get_request_block_hasher(4))
    assert kv.allocate_slots(request, 6) is not None
    kv.check_invariants()
    kv.free(request)
    kv.check_invariants()


def test_recurrent_prompts_always_have_room_to_begin():
    with pytest.raises(ValueError, match=r"raise SchedulerConfig\.long_prefill_token_threshold from 3 to that"):
        Scheduler(make_scheduler([RecurrentSpec(4)]).kv, SchedulerConfig(long_prefill_token_threshold=3))


def test_sizes_that_do_not_go_together_are_refused_at_construction():
    with pytest.raises(
        ValueError, match="chunked local attention has blocks of 4 tokens beside groups that make hits"
    ):
        make_scheduler([FullAttentionSpec(8), ChunkedLocalAttentionSpec(4, 16)])
    with pytest.raises(ValueError, match=r"computed in whole blocks of 32 tokens, beside up to 3 requests that"):
        make_scheduler([FullAttentionSpec(32), RecurrentSpec(32)])
    with pytest.raises(ValueError, match="no manager keeps blocks for KVCacheSpec"):
        make_scheduler([KVCacheSpec(4)])


def test_block_sizes_of_which_none_divides_the_other_are_warned_of(caplog):
    make_scheduler([FullAttentionSpec(8), SlidingWindowSpec(4, 7)])
    assert caplog.text == ""
    scheduler = make_scheduler([FullAttentionSpec(6), SlidingWindowSpec(9, 7)])
    assert "blocks of [6, 9] tokens: hits are multiples of 18 tokens, and shorter prefixes are not" in caplog.text
    scheduler.add_request(make_request(scheduler, "a", range(40)))
    run(scheduler)
    for size, hit in ((18, 0), (19, 18), (40, 36)):
        assert scheduler.kv.get_computed_blocks(make_request(scheduler, str(size), range(size)))[1] == hit


def test_one_kind_of_group_in_several_groups_is_looked_up_together():
    scheduler = make_scheduler([FullAttentionSpec(4), SlidingWindowSpec(4, 7), SlidingWindowSpec(4, 7)])
    assert isinstance(scheduler.kv.coordinator, HybridKVCacheCoordinator)
    scheduler.add_request(make_request(scheduler, "a", range(20)))
    run(scheduler)
    probe = make_request(scheduler, "b", [*range(20), 1])
    hits, length = scheduler.kv.get_computed_blocks(probe)
    assert length == 20
    assert [np.count_nonzero(ids) for ids in hits.blocks] == [5, 2, 2]
    scheduler.kv.evict_blocks([int(hits.blocks[2][-1])])
    assert scheduler.kv.get_computed_blocks(probe)[1] == 16
    assert scheduler.kv.num_limited == [1, 1, 0]

"""Plans of the scheduler, with requests whose next token is always 7."""

import pytest

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.scheduler import Scheduler
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup

pytestmark = pytest.mark.core
HASHER = get_request_block_hasher(4, "sha256", "0")


def make_scheduler(num_blocks=100, max_model_len=200, **options) -> Scheduler:
    kv = KVCacheManager(
        [KVCacheGroup(FullAttentionSpec(4))], num_blocks, max_model_len, watermark=options.get("watermark", 0.0)
    )
    return Scheduler(kv, SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, **options}))


def make_request(name, tokens, max_tokens=4, **options) -> Request:
    return Request(name, tokens, max_tokens=max_tokens, block_hasher=HASHER, **options)


def step(scheduler) -> list[tuple[str, int, int]]:
    """Plan a step, pretend it ran, end who is done; the plan as (id, start, stop)."""
    plan = scheduler.schedule()
    scheduler.commit(plan)
    for entry in plan.scheduled:
        if entry.samples:
            entry.request.append_output_token_ids(7)
            if entry.request.num_output_tokens >= entry.request.max_tokens:
                scheduler.finish(entry.request, RequestStatus.FINISHED_LENGTH)
    scheduler.kv.check_invariants()
    return [(entry.request.request_id, entry.start, entry.stop) for entry in plan.scheduled]


def run(scheduler, limit=500) -> int:
    for nth in range(limit):
        if not scheduler.has_unfinished:
            assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks - 1
            return nth
        step(scheduler)
    raise AssertionError(f"not done after {limit} steps")


def test_running_requests_come_first_and_prompts_share_what_is_left():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(10)))
    assert step(scheduler) == [("a", 0, 10)]
    scheduler.add_request(make_request("b", range(50, 70)))
    scheduler.add_request(make_request("c", range(80, 83)))
    assert step(scheduler) == [("a", 10, 11), ("b", 0, 15)]
    assert step(scheduler) == [("a", 11, 12), ("b", 15, 20), ("c", 0, 3)]
    assert run(scheduler) == 3


def test_chunks_start_after_the_hit():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(17), max_tokens=1))
    run(scheduler)
    scheduler.add_request(make_request("b", [*range(16), *range(100, 130)], max_tokens=1))
    assert step(scheduler) == [("b", 16, 32)]
    assert step(scheduler) == [("b", 32, 46)]


def test_one_step_shares_what_it_computes():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    for name in "abc":
        scheduler.add_request(make_request(name, [*range(16), ord(name), 1]))
    assert step(scheduler) == [("a", 0, 18), ("b", 16, 18), ("c", 16, 18)]
    tables = [scheduler.kv.get_block_ids(name)[0] for name in "abc"]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]


def test_a_single_row_waits_for_a_block_that_this_step_fills():
    """A fused kernel writes and reads for single rows in no order; requests of more rows may share at once."""
    scheduler = make_scheduler()
    first = make_request("a", range(7), max_tokens=5)
    scheduler.add_request(first)
    assert step(scheduler) == [("a", 0, 7)]
    scheduler.add_request(make_request("b", [*first.all_token_ids, 90]))
    assert step(scheduler) == [("a", 7, 8)]
    assert step(scheduler) == [("a", 8, 9), ("b", 8, 9)]
    run(scheduler)


def test_long_prompts_can_be_held_to_a_share():
    scheduler = make_scheduler(long_prefill_token_threshold=6)
    scheduler.add_request(make_request("a", range(20)))
    scheduler.add_request(make_request("b", range(50, 55)))
    assert step(scheduler) == [("a", 0, 6), ("b", 0, 5)]


def test_without_chunks_a_prompt_waits_until_it_fits():
    scheduler = make_scheduler(enable_chunked_prefill=False)
    scheduler.add_request(make_request("a", range(10)))
    scheduler.add_request(make_request("b", range(50, 60)))
    assert step(scheduler) == [("a", 0, 10)]
    assert step(scheduler) == [("a", 10, 11), ("b", 0, 10)]


def test_without_chunks_what_is_longer_than_a_step_is_refused():
    scheduler = make_scheduler(enable_chunked_prefill=False)
    with pytest.raises(
        ValueError, match="the prompt has 17 tokens and is computed in one step, which may have 16"
    ):
        scheduler.add_request(make_request("a", range(17)))
    scheduler.add_request(make_request("b", range(16), max_tokens=6))
    run(scheduler)


def test_at_most_so_many_run():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(make_request(name, [ord(name)], max_tokens=2))
    assert [name for name, *_ in step(scheduler)] == ["a", "b"]
    assert [name for name, *_ in step(scheduler)] == ["a", "b"]
    assert [name for name, *_ in step(scheduler)] == ["c"]


def test_preempted_requests_resume_from_their_own_blocks():
    scheduler = make_scheduler(num_blocks=9)
    a, b = make_request("a", range(12), max_tokens=12), make_request("b", range(50, 62), max_tokens=12)
    scheduler.add_request(a)
    scheduler.add_request(b)
    run(scheduler)
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert scheduler.stats.preempted_hits > 0
    assert a.num_output_tokens == b.num_output_tokens == 12


def test_two_growing_requests_do_not_preempt_each_other_for_ever():
    scheduler = make_scheduler(num_blocks=21)
    for name in "ab":
        scheduler.add_request(make_request(name, [ord(name)] * 4, max_tokens=44))
    run(scheduler)
    assert scheduler.num_preemptions <= 3


def test_priority_decides_who_goes_first_and_who_is_preempted():
    scheduler = make_scheduler(num_blocks=9, policy="priority")
    low, high = make_request("low", range(12), 12, priority=5), make_request("high", range(50, 62), 12, priority=0)
    scheduler.add_request(low)
    scheduler.add_request(high)
    assert step(scheduler)[0][0] == "high"
    run(scheduler)
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_a_victim_that_was_planned_already_is_taken_out_of_the_plan():
    """Under priority the victim may stand earlier in the list; what it was to write must not be findable."""
    scheduler = make_scheduler(num_blocks=8, policy="priority", max_num_batched_tokens=64)
    low = make_request("low", range(9), 12, priority=5)
    scheduler.add_request(low)
    assert step(scheduler) == [("low", 0, 9)]
    high = make_request("high", range(50, 65), 12, priority=0)
    scheduler.add_request(high)
    assert step(scheduler) == [("low", 9, 10), ("high", 0, 15)]
    assert step(scheduler) == [("low", 10, 11), ("high", 15, 16)]
    assert step(scheduler) == [("high", 16, 17)]
    assert low.status is RequestStatus.PREEMPTED
    assert low.num_tokens == 12
    probe = make_request("probe", [*low.all_token_ids, 1])
    assert scheduler.kv.get_computed_blocks(probe)[1] == 8
    run(scheduler)
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_the_watermark_does_not_stop_the_only_request():
    scheduler = make_scheduler(num_blocks=11, watermark=0.5, max_num_batched_tokens=64)
    scheduler.add_request(make_request("a", range(36), max_tokens=3))
    assert step(scheduler) == [("a", 0, 36)]
    run(scheduler)


def test_what_can_never_fit_is_refused_and_the_next_is_served():
    scheduler = make_scheduler(num_blocks=7)
    with pytest.raises(ValueError, match="40 tokens need 10 blocks, but the pool has 6 usable ones: shorten"):
        scheduler.add_request(make_request("big", range(40)))
    grows = make_request("grows", range(20), max_tokens=50)
    scheduler.add_request(grows)
    scheduler.add_request(make_request("small", range(4)))
    run(scheduler)
    assert grows.status is RequestStatus.FINISHED_ERROR
    assert "25 tokens need 7 blocks, but the pool has 6 usable ones" in grows.error
    with pytest.raises(ValueError, match="the prompt has 200 tokens, but prompt and output together may have 200"):
        scheduler.add_request(make_request("long", range(200)))
    scheduler.add_request(make_request("x", [1]))
    with pytest.raises(ValueError, match="request id 'x' is in use"):
        scheduler.add_request(make_request("x", [1]))


def test_a_hit_is_found_again_when_the_request_is_admitted():
    """What was cached when a request queued may be gone when it gets its turn."""
    scheduler = make_scheduler(num_blocks=7, max_num_seqs=1)
    scheduler.add_request(make_request("a", range(12), max_tokens=1))
    run(scheduler)
    b, c = make_request("b", [*range(12), 99], max_tokens=1), make_request("c", range(50, 73), max_tokens=1)
    scheduler.add_request(c)
    scheduler.add_request(b)
    run(scheduler)
    assert (c.num_cached_tokens, b.num_cached_tokens) == (0, 0)


def test_an_abandoned_step_leaves_nothing_findable():
    scheduler = make_scheduler()
    a = make_request("a", range(12))
    scheduler.add_request(a)
    plan = scheduler.schedule()
    probe = make_request("probe", range(13))
    assert scheduler.kv.get_computed_blocks(probe)[1] == 12
    scheduler.abandon(plan, "it broke")
    assert scheduler.kv.get_computed_blocks(probe)[1] == 0
    assert (a.status, a.error) == (RequestStatus.FINISHED_ERROR, "it broke")
    assert not scheduler.has_unfinished
    scheduler.kv.check_invariants()
    assert scheduler.kv.pool.num_free == 99


def test_ends_are_idempotent_wherever_the_request_is():
    scheduler = make_scheduler()
    running, waiting = make_request("r", range(5)), make_request("w", range(5))
    scheduler.add_request(running)
    step(scheduler)
    scheduler.add_request(waiting)
    for request in (running, waiting, running, waiting):
        scheduler.finish(request, RequestStatus.FINISHED_ABORTED)
    assert (len(scheduler.waiting), scheduler.running, scheduler.kv.pool.num_free) == (0, [], 99)


def test_each_admission_counts_once_however_long_it_waits():
    scheduler = make_scheduler(num_blocks=9)
    scheduler.add_request(make_request("a", range(16), max_tokens=6))
    scheduler.add_request(make_request("b", range(50, 66), max_tokens=2))
    run(scheduler)
    assert (scheduler.stats.requests, scheduler.stats.queries) == (2, 32)
    assert scheduler.kv.make_prefix_cache_stats().requests > 2


def test_the_end_of_a_request_says_nothing_of_another_that_has_its_id():
    scheduler = make_scheduler()
    old, new = make_request("a", range(4)), make_request("a", range(8))
    scheduler.add_request(old)
    scheduler.finish(old, RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(new)
    scheduler.finish(old, RequestStatus.FINISHED_ABORTED)
    assert scheduler.requests == {"a": new}
    run(scheduler)
    assert new.status is RequestStatus.FINISHED_LENGTH


def test_who_outgrows_the_pool_ends_in_an_error_even_if_nothing_is_reserved_or_cached():
    scheduler = make_scheduler(num_blocks=5, reserve_full_sequence=False)
    request = make_request("a", range(8), 40, skip_reading_prefix_cache=True, skip_writing_prefix_cache=True)
    scheduler.add_request(request)
    run(scheduler, 30)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert "17 tokens need 5 blocks, but the pool has 4 usable ones" in request.error


def test_aborted_requests_are_not_kept():
    scheduler = make_scheduler(policy="priority")
    requests = [make_request(f"r{nth}", range(4), priority=nth) for nth in range(100)]
    for request in requests:
        scheduler.add_request(request)
    for request in requests[1:]:
        scheduler.finish(request, RequestStatus.FINISHED_ABORTED)
    assert len(scheduler.waiting._heap) <= 2
    assert scheduler.waiting.pop() is requests[0]
    assert len(scheduler.waiting) == 0


def test_waiting_requests_are_aborted_in_any_order_and_come_back():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    requests = [make_request(f"r{nth}", range(4), priority=nth % 3) for nth in range(9)]
    for request in requests:
        scheduler.add_request(request)
    for nth in (4, 0, 8):
        scheduler.finish(requests[nth], RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in scheduler.waiting] == ["r3", "r6", "r1", "r7", "r2", "r5"]
    step(scheduler)
    scheduler.preempt_all()
    assert len(scheduler.waiting) == 6
    first = []
    while scheduler.has_unfinished:
        first += [entry[0] for entry in step(scheduler)]
    assert list(dict.fromkeys(first)) == ["r3", "r6", "r1", "r7", "r2", "r5"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SchedulerConfig(max_num_seqs=0),
            "SchedulerConfig.max_num_seqs must be an integer of at least 1, got 0",
        ),
        (lambda: SchedulerConfig(max_num_batched_tokens=True), "max_num_batched_tokens must be an integer"),
        (lambda: SchedulerConfig(policy="lifo"), "policy must be 'fcfs' or 'priority', got 'lifo'"),
        (lambda: SchedulerConfig(watermark=-0.1), r"watermark must lie in \[0, 1\), got -0.1"),
        (
            lambda: SchedulerConfig(enable_chunked_prefill=False, long_prefill_token_threshold=4),
            "long_prefill_token_threshold cuts prompts into chunks, and enable_chunked_prefill is False",
        ),
        (lambda: CacheConfig(block_size=0), "CacheConfig.block_size must be an integer of at least 1, got 0"),
        (lambda: CacheConfig(block_size=-16), "block_size must be an integer of at least 1, got -16"),
        (lambda: CacheConfig(num_blocks=1), "num_blocks must be an integer of at least 2, got 1"),
        (lambda: CacheConfig(prefix_caching_hash_algo="md5"), "unknown prefix_caching_hash_algo 'md5'"),
        (lambda: CacheConfig(hash_seed=0), "hash_seed must be a string, got 0"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match=r"CacheConfig has no 'block_sise': did you mean block_size\?"):
        CacheConfig(block_sise=16)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="SchedulerConfig has no 'x': it has max_num_seqs, max_num_"):
        SchedulerConfig(4, x=1)  # pyright: ignore[reportCallIssue]

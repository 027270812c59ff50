"""What the observer is told of a cache manager's life."""

import pytest

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.config import SchedulerConfig
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.observer import CacheObserver
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.scheduler import Scheduler
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup

pytestmark = pytest.mark.core


class Bench:
    def __init__(self, num_blocks=6):
        self.now = 0.0
        self.manager = KVCacheManager([KVCacheGroup(FullAttentionSpec(4))], num_blocks, 100)
        self.manager.observer = CacheObserver(num_blocks, 1.0, clock=lambda: self.now)
        self.scheduler = Scheduler(self.manager, SchedulerConfig())
        self.hasher = get_request_block_hasher(4)

    def serve(self, tokens, **options):
        request = Request("r", tokens, block_hasher=self.hasher, **options)
        self.scheduler.add_request(request)
        self.scheduler.commit(self.scheduler.schedule())
        self.scheduler.finish(request, RequestStatus.FINISHED_STOPPED)

    @property
    def missed(self):
        return self.manager.observer.missed_tokens


def test_block_times_follow_a_block_from_allocation_to_eviction():
    bench = Bench()
    for bench.now in (0.0, 2.0, 5.0):
        bench.serve(range(5))
    bench.now = 11.0
    bench.serve(range(100, 117))
    times = bench.manager.observer.take_times()
    assert times.lifetimes == [11.0]
    assert times.idle == [6.0]
    assert times.reuse_gaps == [2.0, 3.0]
    assert bench.manager.observer.take_times().lifetimes == []


def test_misses_are_told_apart_and_add_up():
    bench = Bench()
    bench.serve(range(10))
    assert bench.missed == {"new": 8, "evicted": 0, "tail": 2}
    bench.serve(range(10))
    assert bench.missed == {"new": 8, "evicted": 0, "tail": 4}
    bench.serve(range(50, 68))
    bench.serve(range(10))
    assert bench.missed == {"new": 24, "evicted": 8, "tail": 8}
    stats = bench.scheduler.stats
    assert sum(bench.missed.values()) == stats.queries - stats.hits


def test_requests_that_do_not_read_the_cache_count_as_nothing():
    bench = Bench()
    bench.serve(range(10), skip_reading_prefix_cache=True)
    assert sum(bench.missed.values()) == 0


def test_the_sample_is_checked():
    with pytest.raises(ValueError, match=r"sample must lie in \[0, 1\], got 2"):
        CacheObserver(10, 2)

"""Which blocks each request holds: looked up, allocated, named and given back, all groups together."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxcache.core.block_pool import BlockPool
from jaxcache.core.config import check_eviction_policy
from jaxcache.core.coordinator import make_coordinator
from jaxcache.core.events import EventLog, KVCacheEvent, KVEventsConfig
from jaxcache.core.index import IndexFactory
from jaxcache.core.managers import NO_BLOCKS
from jaxcache.core.observer import CacheObserver
from jaxcache.core.pool import NULL_BLOCK
from jaxcache.core.radix_index import RadixIndex
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.specs import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    RecurrentSpec,
    SinkFullAttentionSpec,
    resolve_block_sizes,
)
from jaxcache.core.stats import PrefixCacheStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVCacheBlocks:
    """Block ids per group, int32; 0 (the null block) where none is needed."""

    blocks: list[np.ndarray]

    def get_block_ids(self) -> list[list[int]]:
        return [ids.tolist() for ids in self.blocks]

    @property
    def empty(self) -> bool:
        return not any(len(ids) for ids in self.blocks)


class KVCacheManager:
    """Decides for each request which cached blocks it takes over and which new ones it gets.

    Blocks are named when they are handed out for writing (`allocate_slots`), so that requests planned later in the
    same step can share them: on the device all of a step's KV is written before any of it is read. If the step
    does not happen, `uncache` takes those names back.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        max_model_len: int,
        *,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        hash_block_size: int | None = None,
        watermark: float = 0.0,
        log_stats: bool = True,
        events: KVEventsConfig | None = None,
        eviction_policy: str = "lru",
        index: IndexFactory = RadixIndex,
    ) -> None:
        """`num_blocks` includes the null block. `watermark`: the share of blocks kept free on admission.

        `events`: keep a log of what can be found, for `take_events`; whoever switches it on must take them.
        """
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark must lie in [0, 1), got {watermark}")
        if not isinstance(max_model_len, int | np.integer) or max_model_len <= 0:
            raise ValueError(f"max_model_len must be a positive integer, got {max_model_len!r}")
        self.groups = tuple(groups)
        self.enable_caching = enable_caching
        self.max_model_len = max_model_len
        self.scheduler_block_size, self.hash_block_size = resolve_block_sizes(self.groups, hash_block_size)
        sizes = sorted({group.spec.block_size for group in self.groups})
        if enable_caching and sizes and self.scheduler_block_size > sizes[-1]:
            logger.warning(
                "blocks of %s tokens: hits are multiples of %d tokens, and shorter prefixes are not shared",
                sizes,
                self.scheduler_block_size,
            )
        check_eviction_policy(eviction_policy)
        self.pool = BlockPool(num_blocks, eviction_policy)
        self._events = None
        if events is not None and events.enable_kv_cache_events:
            self._events = EventLog(self.groups, self.hash_block_size, events)
        block_sizes = [group.spec.block_size for group in self.groups]
        self.index = index(num_blocks, block_sizes, self.hash_block_size, self._events)
        self.coordinator = make_coordinator(
            self.groups,
            self.index,
            enable_caching=enable_caching,
            scheduler_block_size=self.scheduler_block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens or max_model_len,
        )
        self.num_limited = [0] * len(self.groups)
        """Look-ups that each group cut short: what explains hits that stay away."""
        self.sink_blocks = [self._take_sinks(group.spec) for group in self.groups]
        """Per group, the blocks of its attention sinks; most have none."""
        self._num_reserved = sum(map(len, self.sink_blocks))
        self.num_evicted_blocks = 0
        """Named blocks that were taken for other content, since the start."""
        self._step = 0
        """Counts `new_step_starts`; 0 for those who do not speak of steps."""
        self._named_in = np.zeros(num_blocks, np.int64)
        """The step in which each block got its name."""
        self.observer: CacheObserver | None = None
        """Told of every allocation and admission, if there is one."""
        self._watermark_blocks = int(watermark * num_blocks)
        self._log_stats = log_stats
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """The share of usable blocks that requests hold, 0 to 1; blocks only kept for reuse count as free."""
        return self.pool.usage

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The counts since this was last called; `None` if statistics are off."""
        if not self._log_stats:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """What became findable and what no longer is since this was last called; empty where events are off."""
        return self._events.take() if self._events is not None else []

    def new_step_starts(self) -> None:
        """A step is about to be planned: what the last one computed is there now."""
        self._step += 1

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix of `request`: its blocks, and how many tokens they hold.

        At least one token is left to compute, since its output is what predicts the next one. Nothing is held yet.
        """
        if not self.enable_caching or request.get_skip_reading_prefix_cache():
            return KVCacheBlocks(self.coordinator.no_hits), 0
        hit = self.coordinator.find_longest_cache_hit(request, request.num_tokens - 1)
        if hit.limiting_group is not None:
            self.num_limited[hit.limiting_group] += 1
        if self._log_stats:
            self._stats.record(request.num_tokens, hit.num_tokens, request.num_preemptions > 0)
        return KVCacheBlocks(hit.blocks), hit.num_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        *,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Blocks for `num_new_tokens` more tokens, or `None`, with nothing taken, if they do not fit.

        `num_new_computed_tokens`, `new_computed_blocks`: the hit that `get_computed_blocks` found.
        `num_lookahead_tokens`: room beyond the new tokens. `delay_cache_blocks`: name nothing yet.
        `full_sequence_must_fit`: refuse unless all tokens known so far would fit. `reserved_blocks`: free blocks
        promised to others. `has_scheduled_reqs`: others are running, so the watermark applies to an admission.
        Returns the new blocks, without the hit.
        """
        if num_new_tokens <= 0:
            raise ValueError(f"num_new_tokens must be positive, got {num_new_tokens}")
        if self._events is not None and self.enable_caching and request.block_hasher is None:
            raise ValueError(f"KV events tell of blocks by their hashes: give {request!r} a block_hasher")
        name = request.request_id
        hits = self.coordinator.no_hits if new_computed_blocks is None else new_computed_blocks.blocks
        if self._must_wait(hits, num_new_tokens):
            return None
        num_computed = min(request.num_computed_tokens + num_new_computed_tokens, self.max_model_len)
        admission = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        watermark = self._watermark_blocks if has_scheduled_reqs and admission else 0

        for removed in self.coordinator.remove_skipped(name, num_computed):
            self.pool.release(removed)
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        plan = self.coordinator.plan(name, num_slots, hits, num_computed)
        headroom = watermark + reserved_blocks
        if full_sequence_must_fit:
            num_tokens = min(request.num_tokens, self.max_model_len)
            whole = self.coordinator.plan_admission(name, num_tokens, hits, num_computed)
            headroom = max(headroom, watermark + whole - plan.num_new)
        ids = self._take(plan.held_hits, plan.num_new, headroom)
        if ids is None:
            return None
        if any(len(group_hits) for group_hits in hits):
            self.coordinator.add_hits(name, hits, num_computed)
        new_blocks = KVCacheBlocks(self.coordinator.add_blocks(name, plan.new_blocks, ids, num_slots))
        if not delay_cache_blocks:
            self.cache_blocks(request, min(num_computed + num_new_tokens, request.num_tokens))
        request.quiet_until = self.coordinator.quiet_until(name, num_computed + num_new_tokens, num_computed)
        return new_blocks

    def allocate_decodes(self, requests: Sequence[Request]) -> bool:
        """Blocks for the last token of each of `requests`, all others being computed: `allocate_slots` in one go.

        `False`, and nothing done, if they do not all fit, or where blocks are dropped on the way.
        """
        if not self.coordinator.keeps_everything:
            return False
        managers = self.coordinator.managers
        lacking = [(m, r.request_id) for r in requests for m in managers if m.lacks_block(r)]
        if lacking:
            ids = self._take(NO_BLOCKS, len(lacking))
            if ids is None:
                return False
            for nth, (manager, request_id) in enumerate(lacking):
                manager.add_blocks(request_id, ids[nth : nth + 1], 0)
        for request in requests:
            num_tokens = request.num_tokens
            fills_block = [num_tokens % manager.block_size == 0 for manager in managers]
            if any(fills_block):
                self.cache_blocks(request, num_tokens)
            ends = [num_tokens - (num_tokens + 1) % -manager.block_size for manager in managers]
            request.quiet_until = num_tokens if any(fills_block) else min(ends, default=num_tokens)
        return True

    def adopt_decodes(self, requests: Sequence[Request], new_blocks: np.ndarray, pool_state: Any) -> None:
        """Take over what a device call did that let each of `requests` grow, and allocated from the pool itself.

        `new_blocks`: int32 `[steps, requests]`, the block that each got in each step, `NULL_BLOCK` for none. The
        tokens are appended and computed. One group of full attention.
        """
        (manager,) = self.coordinator.managers
        ids = new_blocks[new_blocks != NULL_BLOCK]
        self._forget(ids)
        self.pool.adopt(pool_state)
        for request, own in zip(requests, new_blocks.T):
            manager.add_blocks(request.request_id, own[own != NULL_BLOCK], 0)
            request.quiet_until = 0
            self.cache_blocks(request, request.num_computed_tokens)

    def _take(self, hits: np.ndarray, n: int, headroom: int = 0) -> np.ndarray | None:
        """Hold `hits` and take `n` blocks, which lose their names; `None` if they are not there."""
        ids = self.pool.acquire(hits, n, headroom)
        if ids is not None:
            self._forget(ids, hits)
        return ids

    def _forget(self, taken: np.ndarray, hits: np.ndarray = NO_BLOCKS) -> None:
        """`taken` were allocated (and `hits` held with them): what they held before can be found no more."""
        if self.observer is not None:
            self.observer.allocated(hits, taken, self.index.fingerprints(taken).tolist())
        self.num_evicted_blocks += len(self.index.evict(taken))

    def _must_wait(self, hits: Sequence[np.ndarray], num_new_tokens: int) -> bool:
        """Whether the step being planned only just writes some of `hits`, and this request would read it before.

        A recurrent state is read before the step writes any. A kernel that writes and attends for all single rows
        at once orders them in no way. Other rows are safe: all their KV is written before any of it is read.
        """
        if self._step == 0:
            return False
        for group, ids in zip(self.groups, hits):
            read = ids[-1:] if isinstance(group.spec, RecurrentSpec) else ids[: len(ids) * (num_new_tokens == 1)]
            if (self._named_in[read] == self._step).any():
                return True
        return False

    def observe_admission(self, request: Request, num_hits: int) -> None:
        """Tell the observer, if there is one, what `request` found and what it did not."""
        if self.observer is None:
            return
        size = self.groups[0].spec.block_size
        findable = (request.num_tokens - 1) // self.scheduler_block_size * self.scheduler_block_size
        missing = self.index.fingerprint_at(request, 0, num_hits // size) if num_hits < findable else None
        self.observer.admitted(request.num_tokens, num_hits, findable, missing)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` tokens takes with nothing cached, all groups together."""
        return self.coordinator.plan_admission("", num_tokens, self.coordinator.no_hits, 0)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Name the full blocks of `request`'s first `num_tokens` tokens, so that others find them."""
        if request.skip_writing_prefix_cache:
            return
        ids = self.coordinator.cache_blocks(request, num_tokens)
        self._named_in[ids] = self._step
        self.pool.name(ids, self.index.fingerprints(ids) if self.pool.needs_fingerprints else None)

    def uncache(self, request: Request, num_tokens: int) -> None:
        """Take the names of `request`'s blocks past its first `num_tokens` tokens back: they were not written."""
        request.quiet_until = 0
        for manager in self.coordinator.managers:
            ids = manager.uncache_blocks(request.request_id, num_tokens)
            self.pool.unname(self.index.evict(ids))

    def truncate(self, request: Request, num_tokens: int) -> int:
        """Give back the blocks of `request` past its first `num_tokens` tokens. Returns how many stay computed.

        A block that is full keeps its name and content, so the sequence cannot go on writing into it: where
        `num_tokens` ends inside one, that block is given back as well. Full attention only.
        """
        if not all(isinstance(group.spec, FullAttentionSpec) for group in self.groups):
            raise ValueError("only a sequence of full attention can be cut: other layers no longer have its past")
        request.check_kept(num_tokens)
        request.quiet_until = 0
        name, kept = request.request_id, min(num_tokens, request.num_computed_tokens)
        while (writable := min([kept, *(m.keep_writable(name, kept) for m in self.coordinator.managers)])) < kept:
            kept = writable
        for manager in self.coordinator.managers:
            self.pool.release(manager.cut(name, kept))
        return kept

    def free(self, request: Request) -> None:
        """Give back all that `request` holds, deepest blocks first; named ones stay findable until reused.

        Of a request whose retention is "low", what it did not find in the cache is what is reused next.
        """
        request.quiet_until = 0
        num_own = [0] * len(self.groups)
        if request.cache_retention == "low":
            tables = self.coordinator.block_ids(request.request_id)
            found = [request.num_found_tokens // group.spec.block_size for group in self.groups]
            num_own = [np.count_nonzero(table[n:]) for table, n in zip(tables, found)]
        for ids, own in zip(self.coordinator.pop(request.request_id), num_own):
            self.pool.release(ids[:own], first=True)
            self.pool.release(ids[own:])

    def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """Take the names of `block_ids` away, without freeing them."""
        block_ids = list(dict.fromkeys(block_ids))
        bad = [i for i in block_ids if not NULL_BLOCK < i < self.pool.num_blocks]
        if bad:
            raise ValueError(f"block ids {bad} are not in [1, {self.pool.num_blocks})")
        self.pool.unname(self.index.evict(np.array(block_ids, np.int32)))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. `False`, and nothing done, while any request holds a block."""
        if self.num_held:
            return False
        self.index.clear()
        self.pool.unname_all()
        self._stats.reset = True
        return True

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold: all but the null block and those of attention sinks."""
        return self.pool.num_blocks - 1 - self._num_reserved

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_usable - self.pool.num_free

    @property
    def states_at_block_ends(self) -> bool:
        """Whether a step must end where a block does, for the state there to be kept."""
        return self.enable_caching and any(isinstance(group.spec, RecurrentSpec) for group in self.groups)

    def _take_sinks(self, spec: KVCacheSpec) -> np.ndarray:
        if not isinstance(spec, SinkFullAttentionSpec):
            return NO_BLOCKS
        ids = self.pool.acquire(NO_BLOCKS, spec.sink_len // spec.block_size)
        if ids is None:
            raise ValueError(
                f"{spec.sink_len} sink tokens take {spec.sink_len // spec.block_size} blocks, but the pool has "
                f"{self.pool.num_free} free ones: raise num_blocks"
            )
        return ids

    def warmup(self, num_requests: int = 1) -> None:
        """Compile the pool transitions for requests of all lengths, so many growing at once. Changes nothing."""
        longest = sum(-(-self.max_model_len // group.spec.block_size) for group in self.groups)
        self.pool.warmup(max(longest, num_requests * len(self.groups)))

    def get_block_ids(self, request_id: str) -> list[list[int]]:
        """The request's block table per group; 0 where it holds no block."""
        return [ids.tolist() for ids in self.coordinator.block_ids(request_id)]

    def check_invariants(self) -> None:
        """Raise `RuntimeError`, with the numbers, where pool, index and block tables contradict each other."""
        self.pool.check_invariants()
        self.index.check_invariants()
        holders = np.zeros(self.pool.num_blocks, np.int64)
        for manager in self.coordinator.managers:
            for table in manager.tables.values():
                np.add.at(holders, table.ids, 1)
        for ids in self.sink_blocks:
            holders[ids] += 1
        holders[NULL_BLOCK] = 0
        ref_count, named = self.pool.ref_count(), self.pool.named()
        wrong = np.flatnonzero(holders != ref_count)
        if len(wrong):
            block = wrong[0]
            raise RuntimeError(
                f"block {block} is held by {holders[block]} requests but counted {ref_count[block]} times"
            )
        in_index = np.array([self.index.is_named(i) for i in range(self.pool.num_blocks)])
        wrong = np.flatnonzero(in_index != named)
        if len(wrong):
            raise RuntimeError(f"blocks {wrong[:8]} have a name in the pool or the index, but not in both")

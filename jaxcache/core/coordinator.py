"""The groups of one model together: the longest hit that all agree on, and what a request needs in each.

The coordinator decides; it never moves the pool.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxcache.core.index import PrefixIndex
from jaxcache.core.managers import (
    NO_BLOCKS,
    FullAttentionManager,
    SingleTypeKVCacheManager,
    manager_class,
)
from jaxcache.core.request import Request
from jaxcache.core.specs import CrossAttentionSpec, KVCacheGroup, KVCacheSpec

Hits = list[np.ndarray]
"""Per group, the block ids of a hit, int32."""


@dataclass(frozen=True)
class CacheHit:
    blocks: Hits
    num_tokens: int
    limiting_group: int | None = None
    """The group that allowed no more; `None` if only the request's own length did."""


@dataclass(frozen=True)
class Plan:
    """What an allocation needs: blocks to take in each group, and hits to hold, all groups together."""

    new_blocks: list[int]
    held_hits: np.ndarray

    @property
    def num_new(self) -> int:
        return sum(self.new_blocks)


class KVCacheCoordinator:
    """What all coordinators share: one manager per group, asked in the order of the groups."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        index: PrefixIndex,
        *,
        scheduler_block_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.scheduler_block_size = scheduler_block_size
        self.managers: list[SingleTypeKVCacheManager] = [
            manager_class(group.spec)(
                group.spec,
                group_id,
                index,
                alignment=scheduler_block_size,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
            )
            for group_id, group in enumerate(groups)
        ]

    @property
    def keeps_everything(self) -> bool:
        """Whether all groups have full attention: a sequence only ever adds blocks at its end."""
        return all(isinstance(manager, FullAttentionManager) for manager in self.managers)

    @property
    def no_hits(self) -> Hits:
        return [NO_BLOCKS] * len(self.managers)

    def find_longest_cache_hit(self, request: Request, max_length: int) -> CacheHit:
        """The longest prefix of at most `max_length` tokens that every group can serve."""
        raise NotImplementedError

    def cache_blocks(self, request: Request, num_tokens: int) -> np.ndarray:
        """Name the full blocks of the first `num_tokens` tokens. Returns the ids that got a name."""
        named = [manager.cache_blocks(request, num_tokens) for manager in self.managers]
        return named[0] if len(named) == 1 else np.concatenate(named)

    def plan(self, request_id: str, num_tokens: int, hits: Hits, num_computed_tokens: int) -> Plan:
        plans = [m.plan(request_id, num_tokens, h, num_computed_tokens) for m, h in zip(self.managers, hits)]
        return Plan([new for new, _ in plans], np.concatenate([NO_BLOCKS, *(held for _, held in plans)]))

    def plan_admission(self, request_id: str, num_tokens: int, hits: Hits, num_computed_tokens: int) -> int:
        """Blocks to allocate until the whole sequence is computed."""
        return sum(
            m.plan_admission(request_id, num_tokens, h, num_computed_tokens) for m, h in zip(self.managers, hits)
        )

    def add_hits(self, request_id: str, hits: Hits, num_computed_tokens: int) -> None:
        for manager, ids in zip(self.managers, hits):
            manager.add_hits(request_id, ids, num_computed_tokens)

    def add_blocks(self, request_id: str, new_blocks: list[int], ids: np.ndarray, num_tokens: int) -> Hits:
        """Hand out freshly allocated `ids`, group after group. Returns them per group."""
        parts = [ids] if len(new_blocks) == 1 else np.split(ids, np.cumsum(new_blocks)[:-1]) if new_blocks else []
        for manager, part in zip(self.managers, parts):
            manager.add_blocks(request_id, part, num_tokens)
        return parts

    def block_ids(self, request_id: str) -> Hits:
        return [manager.block_ids(request_id) for manager in self.managers]

    def remove_skipped(self, request_id: str, num_computed_tokens: int) -> Iterator[np.ndarray]:
        """Per group, the ids of the blocks that no later token attends to, taken from the tables."""
        for manager in self.managers:
            yield manager.remove_skipped(request_id, num_computed_tokens)

    def quiet_until(self, request_id: str, num_tokens: int, num_computed_tokens: int) -> int:
        """The number of tokens up to which no group has anything to do for the request, token by token."""
        return min((m.quiet_until(request_id, num_tokens, num_computed_tokens) for m in self.managers), default=0)

    def pop(self, request_id: str) -> Iterator[np.ndarray]:
        """Per group, the blocks that the request held, deepest first; the request is forgotten."""
        for manager in self.managers:
            yield manager.pop(request_id)


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Caching off: nothing is hashed, looked up or named. Any number of groups, none included."""

    def find_longest_cache_hit(self, request: Request, max_length: int) -> CacheHit:
        del request, max_length
        return CacheHit(self.no_hits, 0)

    def cache_blocks(self, request: Request, num_tokens: int) -> np.ndarray:
        del request, num_tokens
        return NO_BLOCKS


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its manager decides."""

    def find_longest_cache_hit(self, request: Request, max_length: int) -> CacheHit:
        (manager,) = self.managers
        hits = manager.find_longest_cache_hit(request, [0], max_length)
        num_tokens = hits.shape[1] * manager.block_size
        limited = num_tokens + manager.block_size <= max_length
        return CacheHit([hits[0]], num_tokens, 0 if limited else None)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups: the longest hit that is one for each. Each group is looked up once."""

    def __init__(self, groups: Sequence[KVCacheGroup], index: PrefixIndex, **settings: int) -> None:
        super().__init__(groups, index, **settings)
        self._index = index
        by_spec: dict[KVCacheSpec, list[int]] = {}
        for group_id, group in enumerate(groups):
            by_spec.setdefault(group.spec, []).append(group_id)
        self._kinds = list(by_spec.values())
        """Groups of one spec hit or miss together."""

    def cache_blocks(self, request: Request, num_tokens: int) -> np.ndarray:
        """Past the last multiple of the scheduler block size no hit can end, so nothing there gets a name."""
        return super().cache_blocks(request, num_tokens // self.scheduler_block_size * self.scheduler_block_size)

    def find_longest_cache_hit(self, request: Request, max_length: int) -> CacheHit:
        """Each kind of group says at which lengths a hit can end; the longest that all have in common is it."""
        num_steps = max_length // self.scheduler_block_size
        common = np.ones(num_steps + 1, np.bool_)
        resident, longest = {}, {}
        for group_ids in self._kinds:
            first = group_ids[0]
            manager = self.managers[first]
            scale = self.scheduler_block_size // manager.block_size
            resident[first] = self._index.resident(request, group_ids, num_steps * scale)
            served = manager.served(resident[first], num_steps * scale)[::scale]
            longest[first] = int(np.flatnonzero(served)[-1])
            common &= served
        steps = int(np.flatnonzero(common)[-1])
        num_tokens = steps * self.scheduler_block_size
        blocks: Hits = self.no_hits
        for group_ids in self._kinds:
            manager = self.managers[group_ids[0]]
            hits = manager.hit(resident[group_ids[0]], num_tokens // manager.block_size)
            for group_id, ids in zip(group_ids, hits):
                blocks[group_id] = ids
        limiting = min(longest, key=lambda group_id: longest[group_id]) if steps < num_steps else None
        return CacheHit(blocks, num_tokens, limiting)


def make_coordinator(
    groups: Sequence[KVCacheGroup], index: PrefixIndex, *, enable_caching: bool, **settings: int
) -> KVCacheCoordinator:
    """The coordinator for `groups`: none, unitary or hybrid."""
    if not enable_caching:
        return KVCacheCoordinatorNoPrefixCache(groups, index, **settings)
    if not groups:
        raise ValueError("prefix caching needs at least one KV-cache group: switch enable_prefix_caching off")
    if any(isinstance(group.spec, CrossAttentionSpec) for group in groups):
        raise ValueError("cross attention is never cached: switch enable_prefix_caching off for this model")
    kind = UnitaryKVCacheCoordinator if len(groups) == 1 else HybridKVCacheCoordinator
    return kind(groups, index, **settings)


__all__ = [
    "CacheHit",
    "HybridKVCacheCoordinator",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "Plan",
    "UnitaryKVCacheCoordinator",
    "make_coordinator",
]

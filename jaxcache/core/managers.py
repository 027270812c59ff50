"""One class per kind of attention: which blocks a hit needs, which can be dropped, which deserve a name.

A manager serves one KV-cache group. It keeps each running request's block table and plans; the pool is moved once
for all groups together, by the cache manager.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jaxcache.core.index import PrefixIndex
from jaxcache.core.pool import NULL_BLOCK
from jaxcache.core.request import Request
from jaxcache.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RecurrentSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    ceil_div,
)

NO_BLOCKS = np.zeros(0, np.int32)
SpecT = TypeVar("SpecT", bound=KVCacheSpec)


class BlockTable:
    """The block ids of one request in one group, in token order; it only grows."""

    __slots__ = ("_ids", "num_blocks")

    def __init__(self) -> None:
        self._ids = np.zeros(8, np.int32)
        self.num_blocks = 0

    @property
    def ids(self) -> np.ndarray:
        """int32 [num_blocks], a view: `NULL_BLOCK` where the request holds no block."""
        return self._ids[: self.num_blocks]

    def extend(self, ids: np.ndarray) -> None:
        end = self.num_blocks + len(ids)
        if end > len(self._ids):
            grown = np.zeros(max(end, 2 * len(self._ids)), np.int32)
            grown[: self.num_blocks] = self.ids
            self._ids = grown
        self._ids[self.num_blocks : end] = ids
        self.num_blocks = end


class SingleTypeKVCacheManager(Generic[SpecT]):
    """What all kinds share. Subclasses say which blocks a hit needs and which are skipped."""

    def __init__(
        self,
        spec: SpecT,
        group_id: int,
        index: PrefixIndex,
        *,
        alignment: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        """`alignment`: hits end at multiples of this many tokens (the scheduler block size)."""
        self.spec = spec
        self.group_id = group_id
        self.block_size = spec.block_size
        self._index = index
        self._alignment = alignment
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self.tables: dict[str, BlockTable] = {}
        self.num_cached_blocks: dict[str, int] = {}
        """Leading blocks of each tracked request that have been offered to the index."""

    # What a hit needs

    def blocks_needed(self, num_blocks: np.ndarray) -> np.ndarray:
        """How many blocks before its end a hit of so many blocks needs, for each entry."""
        raise NotImplementedError

    def served(self, resident: np.ndarray, num_blocks: int) -> np.ndarray:
        """Where a hit can end: bool, for 0, 1, ... `num_blocks` blocks.

        `resident`: what `PrefixIndex.resident` says of the groups of this kind, which hit or miss together.
        """
        ends = np.arange(num_blocks + 1)
        last_miss = ends.copy()
        last_miss[1 : resident.shape[1] + 1][(resident != NULL_BLOCK).all(axis=0)] = 0
        run = ends - np.maximum.accumulate(last_miss)
        return (run >= self.blocks_needed(ends)) & (ends * self.block_size % self._alignment == 0)

    def hit(self, resident: np.ndarray, num_blocks: int) -> np.ndarray:
        """The blocks of a hit of `num_blocks`: int32 `[groups, num_blocks]`, `NULL_BLOCK` where none is needed."""
        blocks = np.full((len(resident), num_blocks), NULL_BLOCK, np.int32)
        first = num_blocks - int(self.blocks_needed(np.array(num_blocks)))
        blocks[:, first:] = resident[:, first:num_blocks]
        return blocks

    def find_longest_cache_hit(self, request: Request, group_ids: Sequence[int], max_length: int) -> np.ndarray:
        """The longest hit of at most `max_length` tokens that all of `group_ids` serve; they have this kind."""
        num_blocks = max_length // self.block_size
        resident = self._index.resident(request, group_ids, num_blocks)
        return self.hit(resident, int(np.flatnonzero(self.served(resident, num_blocks))[-1]))

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that the next token does not attend to."""
        del num_computed_tokens
        return 0

    def cacheable(self, start: int, stop: int) -> np.ndarray | None:
        """Which blocks of `[start, stop)` can ever be part of a hit, bool; `None` for all."""
        del start, stop
        return None

    # What a request holds

    def block_ids(self, request_id: str) -> np.ndarray:
        table = self.tables.get(request_id)
        return NO_BLOCKS if table is None else table.ids

    def plan(
        self, request_id: str, num_tokens: int, hits: np.ndarray, num_computed_tokens: int
    ) -> tuple[int, np.ndarray]:
        """What `num_tokens` tokens need: (blocks to allocate, hits to hold).

        `num_computed_tokens` counts the hits. Hits that are already behind the window are not held.
        """
        required = ceil_div(num_tokens, self.block_size)
        held = len(self.block_ids(request_id))
        if request_id in self.num_cached_blocks:
            return max(required - held, 0), NO_BLOCKS
        skipped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        wanted = hits[max(0, skipped - held) :]
        return max(required - max(skipped, len(hits) + held), 0), wanted[wanted != NULL_BLOCK]

    def plan_admission(self, request_id: str, num_tokens: int, hits: np.ndarray, num_computed_tokens: int) -> int:
        """Blocks to allocate until all `num_tokens` are computed; one recycled on the way counts once."""
        most = self.spec.max_blocks(self._max_model_len, self._max_num_batched_tokens)
        return self.plan(request_id, min(num_tokens, most * self.block_size), hits, num_computed_tokens)[0]

    def lacks_block(self, request: Request) -> bool:
        """Whether the request's known tokens need a block more than it has."""
        return request.num_tokens > self.tables[request.request_id].num_blocks * self.block_size

    def add_hits(self, request_id: str, hits: np.ndarray, num_computed_tokens: int) -> None:
        """Begin the request's table with its hits, which have been touched."""
        table = self.tables.setdefault(request_id, BlockTable())
        skipped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        table.extend(np.full(skipped, NULL_BLOCK, np.int32))
        table.extend(hits[skipped:])
        self.num_cached_blocks[request_id] = table.num_blocks

    def add_blocks(self, request_id: str, ids: np.ndarray, num_tokens: int) -> None:
        """Lengthen the request's table by the blocks that `plan` asked for, so that it covers `num_tokens`."""
        del num_tokens
        self.tables.setdefault(request_id, BlockTable()).extend(ids)

    def cache_blocks(self, request: Request, num_tokens: int) -> np.ndarray:
        """Name the blocks of the first `num_tokens` tokens that are full. Returns the ids that got a name."""
        start = self.num_cached_blocks.get(request.request_id, 0)
        stop = num_tokens // self.block_size
        if start >= stop:
            return NO_BLOCKS
        table = self.block_ids(request.request_id)
        ids = table[start:stop]
        mask = self.cacheable(start, stop)
        if mask is not None:
            ids = np.where(mask, ids, NULL_BLOCK)
        self.num_cached_blocks[request.request_id] = stop
        previous = int(table[start - 1]) if start else NULL_BLOCK
        return self._index.insert(request, self.group_id, start, ids, previous)

    def uncache_blocks(self, request_id: str, num_tokens: int) -> np.ndarray:
        """Forget that blocks past the first `num_tokens` tokens were named. Returns the ids of those blocks."""
        keep = num_tokens // self.block_size
        cached = self.num_cached_blocks.get(request_id, 0)
        if cached <= keep:
            return NO_BLOCKS
        self.num_cached_blocks[request_id] = keep
        ids = self.block_ids(request_id)[keep:cached]
        return ids[ids != NULL_BLOCK]

    def quiet_until(self, request_id: str, num_tokens: int, num_computed_tokens: int) -> int:
        """The number of tokens up to which nothing has to be allocated, named or dropped, token by token.

        `num_tokens` are covered so far; `num_computed_tokens` is what was last dropped for.
        """
        block_end = (num_tokens // self.block_size + 1) * self.block_size
        until = min(block_end - 1, len(self.block_ids(request_id)) * self.block_size)
        dropped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        while until > num_tokens and self.num_skipped_tokens(until - 1) // self.block_size > dropped:
            until -= 1
        return until

    def remove_skipped(self, request_id: str, num_computed_tokens: int) -> np.ndarray:
        """Drop the blocks behind the window from the table. Returns their ids, deepest first."""
        skipped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        ids = self.block_ids(request_id)[:skipped]
        removed = ids[ids != NULL_BLOCK][::-1]
        ids[:] = NULL_BLOCK
        return removed

    def keep_writable(self, request_id: str, num_tokens: int) -> int:
        """The most of the first `num_tokens` tokens that leave the next one in a block that has no name."""
        block = num_tokens // self.block_size
        named = num_tokens % self.block_size and block < self.num_cached_blocks.get(request_id, 0)
        return block * self.block_size if named else num_tokens

    def cut(self, request_id: str, num_tokens: int) -> np.ndarray:
        """Drop the blocks past the first `num_tokens` tokens from the table. Returns their ids, deepest first."""
        kept = ceil_div(num_tokens, self.block_size)
        table = self.tables[request_id]
        cut = table.ids[kept:][::-1].copy()
        table.num_blocks = min(table.num_blocks, kept)
        if request_id in self.num_cached_blocks:
            self.num_cached_blocks[request_id] = min(self.num_cached_blocks[request_id], kept)
        return cut[cut != NULL_BLOCK]

    def pop(self, request_id: str) -> np.ndarray:
        """Forget the request. Returns the blocks that it held, deepest first."""
        table = self.tables.pop(request_id, None)
        self.num_cached_blocks.pop(request_id, None)
        if table is None:
            return NO_BLOCKS
        ids = table.ids[::-1]
        return ids[ids != NULL_BLOCK]


class FullAttentionManager(SingleTypeKVCacheManager[FullAttentionSpec]):
    """A hit is a run of blocks from the first token on. Nothing is ever skipped."""

    def blocks_needed(self, num_blocks: np.ndarray) -> np.ndarray:
        return num_blocks

    def find_longest_cache_hit(self, request: Request, group_ids: Sequence[int], max_length: int) -> np.ndarray:
        resident = self._index.resident(request, group_ids, max_length // self.block_size)
        holes = (resident == NULL_BLOCK).any(axis=0)
        run = int(holes.argmax()) if holes.any() else len(holes)
        return resident[:, : run * self.block_size // self._alignment * self._alignment // self.block_size]


class SlidingWindowManager(SingleTypeKVCacheManager[SlidingWindowSpec]):
    """A hit needs only the blocks that the window of the next token reaches back to."""

    @property
    def _window_blocks(self) -> int:
        return ceil_div(self.spec.sliding_window - 1, self.block_size)

    def blocks_needed(self, num_blocks: np.ndarray) -> np.ndarray:
        return np.minimum(max(self._window_blocks, 1), num_blocks)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.spec.sliding_window + 1)

    def cacheable(self, start: int, stop: int) -> np.ndarray | None:
        """Hits end at multiples of the alignment, so only the last blocks before each can be part of one."""
        per_segment = self._alignment // self.block_size
        if self._window_blocks >= per_segment:
            return None
        return np.arange(start, stop) % per_segment >= per_segment - self._window_blocks


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager[ChunkedLocalAttentionSpec]):
    """A hit needs only the blocks of the chunk that the next token is in."""

    def __init__(
        self, spec: ChunkedLocalAttentionSpec, group_id: int, index: PrefixIndex, *, alignment: int, **limits: int
    ) -> None:
        if alignment != spec.block_size:
            raise ValueError(
                f"chunked local attention has blocks of {spec.block_size} tokens beside groups that make hits "
                f"multiples of {alignment}: give all groups one block size"
            )
        super().__init__(spec, group_id, index, alignment=alignment, **limits)

    def blocks_needed(self, num_blocks: np.ndarray) -> np.ndarray:
        chunk = self.spec.attention_chunk_size
        return num_blocks - num_blocks * self.block_size // chunk * chunk // self.block_size

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return self._chunk_start(num_computed_tokens)

    def _chunk_start(self, num_tokens: int) -> int:
        return num_tokens // self.spec.attention_chunk_size * self.spec.attention_chunk_size


class RecurrentManager(SingleTypeKVCacheManager[RecurrentSpec]):
    """A hit needs one block: the state at its end. A running request holds the state that it goes on from."""

    def blocks_needed(self, num_blocks: np.ndarray) -> np.ndarray:
        return np.minimum(1, num_blocks)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    def plan(
        self, request_id: str, num_tokens: int, hits: np.ndarray, num_computed_tokens: int
    ) -> tuple[int, np.ndarray]:
        required = ceil_div(num_tokens, self.block_size)
        held = max(len(self.block_ids(request_id)), len(hits))
        return int(required > held), hits[-1:] if request_id not in self.tables else NO_BLOCKS

    def add_blocks(self, request_id: str, ids: np.ndarray, num_tokens: int) -> None:
        """States between the one read and the one written are not kept."""
        table = self.tables.setdefault(request_id, BlockTable())
        between = ceil_div(num_tokens, self.block_size) - table.num_blocks - len(ids)
        table.extend(np.full(max(between, 0), NULL_BLOCK, np.int32))
        table.extend(ids)


class CrossAttentionManager(SingleTypeKVCacheManager[CrossAttentionSpec]):
    """As many blocks as the encoder's output needs, taken at once; nothing is looked up or named."""

    def plan(
        self, request_id: str, num_tokens: int, hits: np.ndarray, num_computed_tokens: int
    ) -> tuple[int, np.ndarray]:
        required = ceil_div(self.num_encoder_tokens.get(request_id, 0), self.block_size)
        return max(required - len(self.block_ids(request_id)), 0), NO_BLOCKS

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.num_encoder_tokens: dict[str, int] = {}
        """Set for each request before it is admitted."""

    def pop(self, request_id: str) -> np.ndarray:
        self.num_encoder_tokens.pop(request_id, None)
        return super().pop(request_id)


MANAGERS: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: FullAttentionManager,
    SinkFullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    RecurrentSpec: RecurrentManager,
    CrossAttentionSpec: CrossAttentionManager,
}


def manager_class(spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The manager for `spec`; a `ValueError` for a kind without one."""
    try:
        return MANAGERS[type(spec)]
    except KeyError:
        known = ", ".join(kind.__name__ for kind in MANAGERS)
        raise ValueError(f"no manager keeps blocks for {type(spec).__name__}: known are {known}") from None

"""The reference's way: fingerprint -> blocks, and an exact record beside each block.

A fingerprint proves nothing: each named block carries a record of what it was made from, and only a block whose
record equals the request's own content, back to the first token, is a hit.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxcache.core.events import EventLog
from jaxcache.core.hashing import ExtraKeys, block_hash_with_group_id, split_group_id
from jaxcache.core.pool import NULL_BLOCK
from jaxcache.core.request import Request


class BlockRecord:
    """What one block holds, and the record of the block before it: equal records mean equal content."""

    __slots__ = ("extra_keys", "namespace", "parent", "tokens")

    def __init__(
        self,
        parent: "BlockRecord | None",
        namespace: tuple[Any, ...],
        tokens: bytes,
        extra_keys: tuple[ExtraKeys | None, ...],
    ) -> None:
        self.parent = parent
        self.namespace = namespace
        self.tokens = tokens
        self.extra_keys = extra_keys

    def equals(self, other: "BlockRecord") -> bool:
        """Whether both hold the same, whatever stands before them."""
        return (
            self.tokens == other.tokens
            and self.extra_keys == other.extra_keys
            and self.namespace == other.namespace
        )


class HashIndex:
    """Fingerprint and group -> blocks, oldest first.

    One content may stand in several blocks (block tables only grow, so a block computed twice stays twice); a
    look-up takes the one that was named first.
    """

    def __init__(
        self,
        num_blocks: int,
        block_sizes: Sequence[int],
        hash_block_size: int,
        events: EventLog | None = None,
    ) -> None:
        """`block_sizes`: tokens per block of each group, multiples of `hash_block_size`."""
        self._events = events
        self._blocks: dict[bytes, list[int]] = {}
        self._keys: list[bytes | None] = [None] * num_blocks
        self._records: list[BlockRecord | None] = [None] * num_blocks
        self._block_sizes = tuple(block_sizes)
        self._hash_block_size = hash_block_size
        self.num_rejected = 0
        """Blocks whose fingerprint matched but whose content did not."""

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> Iterable[bytes]:
        return self._blocks.keys()

    def fingerprints(self, block_ids: np.ndarray) -> np.ndarray:
        keys = [self._keys[block_id] for block_id in block_ids.tolist()]
        return np.array([zlib.crc32(key or b"") for key in keys], np.uint32)

    def fingerprint_at(self, request: Request, group_id: int, position: int) -> int:
        return zlib.crc32(self._key(request, group_id, position))

    def is_named(self, block_id: int) -> bool:
        return self._keys[block_id] is not None

    def resident(self, request: Request, group_ids: Sequence[int], num_blocks: int) -> np.ndarray:
        found = [[self._find(request, group, at) for at in range(num_blocks)] for group in group_ids]
        return np.array(found, np.int32).reshape(len(group_ids), num_blocks)

    def _find(self, request: Request, group_id: int, position: int) -> int:
        """The group's block at `position`, or 0."""
        for block_id in self._blocks.get(self._key(request, group_id, position), ()):
            if self._holds(self._records[block_id], request, self._block_sizes[group_id], position):
                return block_id
            self.num_rejected += 1
        return NULL_BLOCK

    def insert(
        self, request: Request, group_id: int, start: int, block_ids: np.ndarray, previous: int
    ) -> np.ndarray:
        del previous
        inserted, positions, stop = [], [], start
        for position, block_id in enumerate(block_ids.tolist(), start):
            stop = position + 1
            if block_id == NULL_BLOCK:
                continue
            key = self._key(request, group_id, position)
            if self._keys[block_id] == key:
                continue
            if self._keys[block_id] is not None:
                raise RuntimeError(f"block {block_id} has a name already: evict it before it gets another")
            self._blocks.setdefault(key, []).append(block_id)
            self._keys[block_id] = key
            self._records[block_id] = self._record(request, self._block_sizes[group_id], position)
            inserted.append(block_id)
            positions.append(position)
        if self._events is not None and stop > start:
            self._events.stored(request, group_id, start, stop, positions)
        return np.array(inserted, np.int32)

    def evict(self, block_ids: np.ndarray) -> np.ndarray:
        evicted = []
        for block_id in block_ids.tolist():
            key = self._keys[block_id]
            if key is None:
                continue
            blocks = self._blocks[key]
            blocks.remove(block_id)
            if not blocks:
                del self._blocks[key]
            self._keys[block_id] = self._records[block_id] = None
            evicted.append(block_id)
            if self._events is not None:
                self._events.removed(*split_group_id(key), still_served=bool(blocks))
        return np.array(evicted, np.int32)

    def clear(self) -> None:
        self._blocks.clear()
        self._keys = [None] * len(self._keys)
        self._records = [None] * len(self._records)
        if self._events is not None:
            self._events.cleared()

    def check_invariants(self) -> None:
        listed = [block_id for blocks in self._blocks.values() for block_id in blocks]
        named = [block_id for block_id, key in enumerate(self._keys) if key is not None]
        if sorted(listed) != named:
            odd = sorted(set(listed) ^ set(named))[:8]
            raise RuntimeError(f"hash index: blocks {odd} are listed or named, not both")
        for key, blocks in self._blocks.items():
            if any(self._keys[block_id] != key for block_id in blocks):
                raise RuntimeError(f"hash index: blocks {blocks} do not all carry the key they are listed under")

    def _key(self, request: Request, group_id: int, position: int) -> bytes:
        """A coarse block's hash is that of the last fine block in it, since each hash covers all before it."""
        scale = self._block_sizes[group_id] // self._hash_block_size
        return block_hash_with_group_id(request.block_hashes[(position + 1) * scale - 1], group_id)

    def _holds(self, record: BlockRecord | None, request: Request, block_size: int, position: int) -> bool:
        """Whether `record`, and every record before it, says what `request` holds up to block `position`.

        Records found equal are shared from then on, so that the next comparison stops where this one began.
        """
        theirs, mine = record, self._record(request, block_size, position)
        same = []
        while theirs is not mine:
            if theirs is None or mine is None or not theirs.equals(mine):
                return False
            same.append((mine, theirs))
            theirs, mine = theirs.parent, mine.parent
        for mine, theirs in same:
            mine.parent = theirs.parent
        if same:
            request.records[block_size][position] = same[0][1]
        return True

    def _record(self, request: Request, block_size: int, position: int) -> BlockRecord:
        """The request's own record of block `position`, made with those before it when first asked for."""
        records = request.records.setdefault(block_size, [])
        scale = block_size // self._hash_block_size
        keys = (
            request.extra_keys(self._hash_block_size, (position + 1) * scale) if len(records) <= position else []
        )
        while len(records) <= position:
            nth = len(records)
            records.append(
                BlockRecord(
                    records[-1] if records else None,
                    request.namespace,
                    request.all_token_ids[nth * block_size : (nth + 1) * block_size].tobytes(),
                    tuple(keys[nth * scale : (nth + 1) * scale]),
                )
            )
        return records[position]

"""From content to blocks: which resident blocks hold exactly the tokens that a request starts with.

Blocks are looked up by fingerprint, but a fingerprint proves nothing: each named block carries a record of what it
was made from, and only a block whose record equals the request's own content, back to the first token, is a hit.
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
        """Distinct keys."""
        return len(self._blocks)

    def keys(self) -> Iterable[bytes]:
        """Of all contents that are there: fingerprint and group."""
        return self._blocks.keys()

    def fingerprints(self, block_ids: Sequence[int]) -> np.ndarray:
        """32 bits of each block's key, uint32; 0 for one without a name."""
        return np.array([zlib.crc32(self._keys[block_id] or b"") for block_id in block_ids], np.uint32)

    def fingerprint_at(self, request: Request, group_id: int, position: int) -> int:
        """The fingerprint that a block would have that holds what `request` has at `position`."""
        return zlib.crc32(self._key(request, group_id, position))

    def is_named(self, block_id: int) -> bool:
        return self._keys[block_id] is not None

    def match(self, request: Request, group_ids: Sequence[int], start: int, stop: int) -> np.ndarray:
        """Blocks of the longest run from block `start` on that all groups hold, before block `stop`.

        int32 [len(group_ids), run length]. The groups have one block size.
        """
        run = []
        for position in range(start, stop):
            blocks = self.find(request, group_ids, position)
            if blocks is None:
                break
            run.append(blocks)
        return np.array(run, np.int32).reshape(len(run), len(group_ids)).T

    def find(self, request: Request, group_ids: Sequence[int], position: int) -> list[int] | None:
        """The block at `position` in each group, or `None` if any group misses."""
        found = []
        for group_id in group_ids:
            for block_id in self._blocks.get(self._key(request, group_id, position), ()):
                if self._holds(self._records[block_id], request, self._block_sizes[group_id], position):
                    found.append(block_id)
                    break
                self.num_rejected += 1
            else:
                return None
        return found

    def insert(self, request: Request, group_id: int, start: int, block_ids: Iterable[int]) -> list[int]:
        """Name the blocks of positions `start`, `start + 1`, ... after what `request` holds there.

        Null blocks are skipped, and so is a block that has the name already. Returns the ids that are new here.
        """
        inserted, positions, stop = [], [], start
        for position, block_id in enumerate(block_ids, start):
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
        return inserted

    def evict(self, block_ids: Iterable[int]) -> list[int]:
        """Take the names of `block_ids` away. Returns those that had one."""
        evicted = []
        for block_id in block_ids:
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
        return evicted

    def clear(self) -> None:
        """Take all names away."""
        self._blocks.clear()
        self._keys = [None] * len(self._keys)
        self._records = [None] * len(self._records)
        if self._events is not None:
            self._events.cleared()

    def check_invariants(self) -> None:
        """Raise `RuntimeError` if blocks and names contradict each other."""
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
        while len(records) <= position:
            nth = len(records)
            records.append(
                BlockRecord(
                    records[-1] if records else None,
                    request.namespace,
                    request.all_token_ids[nth * block_size : (nth + 1) * block_size].tobytes(),
                    tuple(request.block_extra_keys[nth * scale : (nth + 1) * scale]),
                )
            )
        return records[position]

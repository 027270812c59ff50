"""What the cache tells the outside: which block contents can be found from now on, and which no longer.

The events are those of vLLM 0.25.1, field for field, so that routers and indexers built for it understand ours:
`wire()` gives the map that, as MessagePack, is theirs byte for byte. The index writes into an `EventLog` where one
is given, and does nothing more where none is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxcache.core.hashing import BlockHash, external_block_hash, generate_block_hash_extra_keys
from jaxcache.core.request import Request
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
)
from jaxcache.settings import settings

ExternalBlockHash = int | bytes
"""A fingerprint as events carry it: its last 8 bytes as an unsigned integer (big-endian), or all of it."""

MEDIUM_DEVICE = "GPU"
"""What the wire format calls the memory that attention reads."""

_KINDS: dict[type[KVCacheSpec], str] = {
    FullAttentionSpec: "full_attention",
    MLAAttentionSpec: "mla_attention",
    SinkFullAttentionSpec: "sink_full_attention",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalAttentionSpec: "chunked_local_attention",
    RecurrentSpec: "mamba",
    CrossAttentionSpec: "cross_attention",
}
"""The reference's words."""


@settings
class KVEventsConfig:
    """What is told, and to whom. Field names are the reference's where it has the field."""

    enable_kv_cache_events: bool = False
    endpoint: str = "tcp://*:5557"
    """Where the publisher sends; bound if it is ipc or inproc or holds `*` (every network interface) or `::`,
    connected to otherwise."""
    replay_endpoint: str | None = None
    """Where subscribers ask for batches that they missed; always bound."""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Batches kept for a slow subscriber; what comes on top is lost for it alone."""
    max_queue_size: int = 100_000
    """Batches that wait for the publisher's thread; what comes on top is lost and shows as a gap."""
    topic: str = ""
    int_block_hashes: bool = True
    """Fingerprints as 64-bit integers instead of bytes."""
    report_duplicate_removals: bool = False
    """Report a removal even while another block still serves the same content, as the reference does."""

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"KVEventsConfig.{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True)
class BlockStored:
    """Blocks `block_hashes`, one chain, can be found from now on."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    """Of the block before the first token of `token_ids`; `None` at the beginning of a sequence."""
    token_ids: list[int]
    """Of the whole range of blocks that was looked at, also of those that a windowed group does not keep."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Per block, what entered its fingerprint besides tokens."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks `block_hashes` can be found no longer."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def wire(event: KVCacheEvent) -> dict[str, Any]:
    """`event` as the map that is sent: its type, then its fields in order, those left at their default omitted."""
    known = {field.name: (getattr(event, field.name), field.default) for field in fields(event)}
    return {"type": type(event).__name__} | {k: value for k, (value, default) in known.items() if value != default}


class EventLog:
    """Collects events until somebody takes them. One per cache manager, written by its index."""

    def __init__(self, groups: Sequence[KVCacheGroup], hash_block_size: int, config: KVEventsConfig) -> None:
        self._specs = [group.spec for group in groups]
        self._hash_block_size = hash_block_size
        self._config = config
        self._events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        """All events since this was last called, oldest first."""
        events, self._events = self._events, []
        return events

    def stored(self, request: Request, group_id: int, start: int, stop: int, positions: Sequence[int]) -> None:
        """Of `request`'s blocks `[start, stop)` in a group, those at `positions` got a name."""
        spec = self._specs[group_id]
        scale = spec.block_size // self._hash_block_size

        def hash_at(position: int) -> ExternalBlockHash:
            return self._external(request.block_hashes[(position + 1) * scale - 1])

        self._events.append(
            BlockStored(
                block_hashes=[hash_at(position) for position in positions],
                parent_block_hash=hash_at(start - 1) if start else None,
                token_ids=request.all_token_ids[start * spec.block_size : stop * spec.block_size].tolist(),
                block_size=spec.block_size,
                lora_id=request.adapter_id,
                medium=MEDIUM_DEVICE,
                lora_name=request.adapter,
                extra_keys=[_extra_keys(request, position, spec.block_size) for position in positions] or None,
                group_idx=group_id,
                kv_cache_spec_kind=_KINDS[type(spec)],
                kv_cache_spec_sliding_window=getattr(spec, "sliding_window", None),
            )
        )

    def removed(self, block_hash: BlockHash, group_id: int, still_served: bool) -> None:
        """A block lost its name. `still_served`: another block holds the same content."""
        if not still_served or self._config.report_duplicate_removals:
            self._events.append(BlockRemoved([self._external(block_hash)], MEDIUM_DEVICE, group_id))

    def cleared(self) -> None:
        """All names are gone."""
        self._events.append(AllBlocksCleared())

    def _external(self, block_hash: BlockHash) -> ExternalBlockHash:
        return external_block_hash(block_hash) if self._config.int_block_hashes else block_hash


def _extra_keys(request: Request, position: int, block_size: int) -> tuple[Any, ...] | None:
    keys, _ = generate_block_hash_extra_keys(request, position * block_size, (position + 1) * block_size)
    return keys.flat() if keys else None

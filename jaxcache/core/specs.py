"""What each kind of attention keeps: KV-cache specs, and groups of layers that share one spec and block table."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheSpec:
    """`block_size`: tokens per block."""

    block_size: int

    def __post_init__(self) -> None:
        _positive(self, "block_size")


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to all before it, so every block is kept."""


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """A token attends to itself and the `sliding_window - 1` before it; blocks behind the window are dropped."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "sliding_window")


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A token attends within its chunk of `attention_chunk_size` tokens; blocks of earlier chunks are dropped."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "attention_chunk_size")


def _positive(spec: KVCacheSpec, field: str) -> None:
    value = getattr(spec, field)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{type(spec).__name__}.{field} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that keep the same tokens in the same blocks: one block table for all of them."""

    spec: KVCacheSpec
    layers: tuple[int, ...] = ()


def resolve_block_sizes(groups: tuple[KVCacheGroup, ...], hash_block_size: int | None = None) -> tuple[int, int]:
    """(scheduler block size, hash block size) in tokens.

    A hit is a multiple of the first, the least common multiple of the groups' block sizes; tokens are hashed in
    blocks of the second, by default their greatest common divisor.
    """
    sizes = [group.spec.block_size for group in groups]
    if not sizes:
        return 1, 1
    if hash_block_size is None:
        hash_block_size = math.gcd(*sizes)
    if not isinstance(hash_block_size, int) or isinstance(hash_block_size, bool) or hash_block_size <= 0:
        raise ValueError(f"hash_block_size must be a positive integer, got {hash_block_size!r}")
    uneven = [size for size in sizes if size % hash_block_size]
    if uneven:
        raise ValueError(
            f"hash_block_size {hash_block_size} does not divide the block sizes {uneven}: "
            f"choose a divisor of {math.gcd(*sizes)}, or leave it out"
        )
    return math.lcm(*sizes), hash_block_size

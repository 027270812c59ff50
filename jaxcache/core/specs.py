"""What each kind of attention keeps: KV-cache specs, and groups of layers that share one spec and block table."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheSpec:
    """`block_size`: tokens per block."""

    block_size: int

    def __post_init__(self) -> None:
        _positive(self, "block_size")

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds at most, computed in steps of at most so many."""
        del max_num_batched_tokens
        return ceil_div(num_tokens, self.block_size)


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to all before it, so every block is kept."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Full attention over a latent vector per token (DeepSeek-V2, arXiv:2405.04434): kept like any other KV."""


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention beside `sink_len` KV entries that belong to the model and stand before every sequence.

    Their blocks are taken from the pool once, and never given back.
    """

    sink_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "sink_len")
        if self.sink_len % self.block_size:
            raise ValueError(
                f"sink_len {self.sink_len} is not a multiple of the block size {self.block_size}: pad the sinks"
            )


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """A token attends to itself and the `sliding_window - 1` before it; blocks behind the window are dropped."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "sliding_window")

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """One more than the window and a step need, since neither begins at a block's start."""
        in_flight = min(self.sliding_window - 1 + max_num_batched_tokens, num_tokens)
        return ceil_div(in_flight, self.block_size) + 1


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A token attends within its chunk of `attention_chunk_size` tokens; blocks of earlier chunks are dropped.

    A chunk that begins inside a block keeps that whole block.
    """

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "attention_chunk_size")

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        in_flight = min(self.attention_chunk_size + max_num_batched_tokens, num_tokens)
        inside_a_block = self.attention_chunk_size % self.block_size > 0
        return ceil_div(in_flight, self.block_size) + inside_a_block


@dataclass(frozen=True)
class RecurrentSpec(KVCacheSpec):
    """A state of fixed size instead of KV (Mamba, linear attention).

    Block `i` of a sequence holds the state after the last computed token among `i * block_size` and on; once the
    block is full that is the state from which any sequence with the same prefix can go on.
    """

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """The state that is read and the one that is written."""
        return min(2, super().max_blocks(num_tokens, max_num_batched_tokens))


@dataclass(frozen=True)
class CrossAttentionSpec(KVCacheSpec):
    """Decoder tokens attend to an encoder's output: as many blocks as that needs, and none is ever shared."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


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

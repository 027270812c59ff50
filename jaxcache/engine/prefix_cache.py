"""Prefix caching for one's own model and one's own jitted step: the library plans, the user computes."""

from collections.abc import Iterable, Sequence
from itertools import count

import jax
import numpy as np

from jaxcache.core.cache_manager import KVCacheBlocks, KVCacheManager
from jaxcache.core.config import CacheConfig
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.request import Request, RequestStatus, pack_token_ids
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup
from jaxcache.engine.step_inputs import Buckets, SequenceSlice, build_step_inputs
from jaxcache.kernels import layout
from jaxcache.kernels.layout import KVCache, KVLayout
from jaxcache.kernels.step import StepInputs


class CacheFull(RuntimeError):
    """The pool has not enough free blocks. The sequence that found none is as it was before."""


def init_kv(
    config: CacheConfig,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
) -> KVCache:
    """The KV array for `config.num_blocks` blocks: zeros, a plain pytree, to be donated from step to step."""
    return layout.init_kv(
        KVLayout(num_kv_heads, head_dim, config.block_size), num_layers, _num_blocks(config), dtype
    )


class CachedSequence:
    """One open sequence: its tokens, and the blocks that hold their KV. Closes itself as a context manager."""

    def __init__(self, cache: "PrefixCache", request: Request) -> None:
        self._cache = cache
        self._request = request

    @property
    def token_ids(self) -> list[int]:
        """The prompt and all committed tokens."""
        return self._request.all_token_ids.tolist()

    @property
    def num_tokens(self) -> int:
        return self._request.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV was there when the sequence was opened."""
        return self._request.num_cached_tokens or 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is there now."""
        return self._request.num_computed_tokens

    @property
    def block_ids(self) -> list[int]:
        """The block table: block `i` holds tokens `i * block_size` and on."""
        return self._cache.block_ids(self)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append known tokens, the next turn of a conversation say; `step_inputs` computes them."""
        self._cache.extend(self, token_ids)

    def truncate(self, num_tokens: int) -> None:
        """Drop all tokens past the first `num_tokens`, computed or not."""
        self._cache.truncate(self, num_tokens)

    def close(self) -> None:
        """Give the blocks back; those that are full stay findable until they are needed for something else."""
        self._cache.close(self)

    def __enter__(self) -> "CachedSequence":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class PrefixCache:
    """Block tables, slots and "how much is already computed" for sequences that share prefixes.

    `open` finds the longest cached prefix and reserves the rest of the prompt; `step_inputs` says what to compute;
    `commit` says that it was computed and which token follows. Only committed blocks can be found by others.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_model_len: int | None = None,
        max_seqs: int = 64,
        buckets: Buckets | None = None,
    ) -> None:
        """`max_model_len`: the longest sequence, by default what the pool holds. `max_seqs`: most in a step.

        `buckets`: the shapes that `step_inputs` gives, by default powers of two up to a step of `max_seqs` whole
        sequences; `max_seqs` is then not asked.
        """
        num_blocks = _num_blocks(config)
        capacity = (num_blocks - 1) * config.block_size
        self.config = config
        self._max_model_len = capacity if max_model_len is None else max_model_len
        if not 0 < self._max_model_len <= capacity:
            raise ValueError(
                f"max_model_len must lie in [1, {capacity}], the tokens of {num_blocks} blocks, got "
                f"{max_model_len!r}: lower it, or raise CacheConfig.num_blocks"
            )
        self._kv = KVCacheManager(
            [KVCacheGroup(FullAttentionSpec(config.block_size))],
            num_blocks,
            self._max_model_len,
            enable_caching=config.enable_prefix_caching,
            hash_block_size=config.hash_block_size,
            eviction_policy=config.eviction_policy,
        )
        self._hasher = None
        if config.enable_prefix_caching:
            self._hasher = get_request_block_hasher(
                self._kv.hash_block_size, config.prefix_caching_hash_algo, config.hash_seed
            )
        self._buckets = buckets or Buckets.for_limits(self._max_model_len * max_seqs, max_seqs)
        self._open: dict[str, CachedSequence] = {}
        self._ids = count()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no open sequence holds; full ones among them still serve hits."""
        return self._kv.pool.num_free

    def open(self, token_ids: Iterable[int], *, salt: str | None = None) -> CachedSequence:
        """A sequence that begins with `token_ids`, its cached prefix taken over, room reserved for the rest.

        `salt`: only sequences with the same salt share blocks. `CacheFull` if it does not fit, `ValueError` if
        it never could.
        """
        request = Request(str(next(self._ids)), token_ids, cache_salt=salt, block_hasher=self._hasher)
        if request.num_tokens > self._max_model_len:
            raise ValueError(
                f"the prompt has {request.num_tokens} tokens, but a sequence may have {self._max_model_len}: "
                "shorten it, or raise CacheConfig.num_blocks"
            )
        hits, num_hits = self._kv.get_computed_blocks(request)
        self._allocate(request, request.num_tokens - num_hits, num_hits, hits)
        request.num_computed_tokens = request.num_cached_tokens = num_hits
        request.status = RequestStatus.RUNNING
        sequence = CachedSequence(self, request)
        self._open[request.request_id] = sequence
        return sequence

    def step_inputs(self, sequences: Sequence[CachedSequence], *, max_tokens: int | None = None) -> StepInputs:
        """The arrays for computing all tokens of `sequences` that are not computed yet, padded to a bucket.

        `max_tokens`: at most so many of each sequence, so that a long prompt is computed piece by piece; a row's
        output then predicts the next token only in the step that reaches the sequence's end. `CacheFull` if a
        token committed since has no room.
        """
        if max_tokens is not None and max_tokens <= 0:
            raise ValueError(f"max_tokens must be positive, got {max_tokens!r}")
        slices = [self._slice(self._request(sequence), max_tokens) for sequence in sequences]
        shape = self._buckets.fit(sum(len(piece.token_ids) for piece in slices), len(slices))
        (step,) = build_step_inputs(
            slices,
            shape,
            block_size=self.config.block_size,
            table_width=-(-self._max_model_len // self.config.block_size),
            tile_size=self._buckets.tile_size,
            share_runs=self.config.shared_prefix_attention,
        )
        return step

    def commit(self, sequence: CachedSequence, token: int | None = None, *, num_tokens: int | None = None) -> None:
        """The step was computed: its full blocks become findable, and `token` is appended.

        `num_tokens`: how many tokens of the sequence the step computed, by default all that were left. `token` is
        what comes after the last; `None` while the prompt is computed piece by piece. A `ValueError`, with nothing
        changed, if the two do not go with what `step_inputs` gave.
        """
        request = self._request(sequence)
        left = request.num_tokens - request.num_computed_tokens
        done = left if num_tokens is None else num_tokens
        if not 0 <= done <= left:
            raise ValueError(f"num_tokens {done} computed, but the sequence had {left} left to compute")
        if token is not None and done < left:
            raise ValueError(f"a token follows the last one, but {left - done} before it are not computed yet")
        room = len(self.block_ids(sequence)) * self.config.block_size
        if request.num_computed_tokens + done > room:
            raise ValueError(
                f"{request.num_computed_tokens + done} tokens computed, but the sequence's blocks hold {room}: "
                "step_inputs takes the blocks that the next step writes"
            )
        following = () if token is None else pack_token_ids([token], what="committed")
        request.num_computed_tokens += done
        if self.config.enable_prefix_caching:
            self._kv.cache_blocks(request, request.num_computed_tokens)
        request.append_output_token_ids(following)

    def extend(self, sequence: CachedSequence, token_ids: Iterable[int]) -> None:
        """Append known tokens. Blocks for them are taken when they are to be computed."""
        request = self._request(sequence)
        packed = pack_token_ids(token_ids, what="sequence")
        if request.num_tokens + len(packed) > self._max_model_len:
            raise ValueError(
                f"{len(packed)} more tokens make {request.num_tokens + len(packed)}, but a sequence may have "
                f"{self._max_model_len}"
            )
        request.append_output_token_ids(packed)

    def truncate(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Drop all tokens past the first `num_tokens`; blocks that held them and are full stay findable."""
        request = self._request(sequence)
        kept = self._kv.truncate(request, num_tokens)
        request.truncate(num_tokens)
        request.num_computed_tokens = min(kept, num_tokens)

    def close(self, sequence: CachedSequence) -> None:
        """Give the sequence's blocks back. Twice is once."""
        if self._open.pop(sequence._request.request_id, None) is sequence:
            self._kv.free(sequence._request)

    def block_ids(self, sequence: CachedSequence) -> list[int]:
        return self._kv.get_block_ids(self._request(sequence).request_id)[0]

    def reset(self) -> bool:
        """Forget all cached content; `False`, and nothing done, while sequences are open."""
        return self._kv.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Raise `RuntimeError`, with the numbers, if the bookkeeping contradicts itself."""
        self._kv.check_invariants()

    def _request(self, sequence: CachedSequence) -> Request:
        if self._open.get(sequence._request.request_id) is not sequence:
            raise ValueError("this sequence is closed, or belongs to another cache: open it again")
        return sequence._request

    def _slice(self, request: Request, max_tokens: int | None) -> SequenceSlice:
        start, stop = request.num_computed_tokens, request.num_tokens
        if start == stop:
            raise ValueError("nothing to compute for this sequence: commit the token that follows first")
        if max_tokens is not None:
            stop = min(stop, start + max_tokens)
        if stop > self._max_model_len:
            raise CacheFull(
                f"the sequence has reached {self._max_model_len} tokens, the most it may have: close it"
            )
        (block_ids,) = self._kv.coordinator.block_ids(request.request_id)
        if stop > len(block_ids) * self.config.block_size:
            self._allocate(request, stop - start)
            (block_ids,) = self._kv.coordinator.block_ids(request.request_id)
        return SequenceSlice(np.frombuffer(request.all_token_ids[start:stop], np.int32), start, [block_ids])

    def _allocate(
        self, request: Request, num_tokens: int, num_hits: int = 0, hits: KVCacheBlocks | None = None
    ) -> None:
        blocks = self._kv.allocate_slots(request, num_tokens, num_hits, hits, delay_cache_blocks=True)
        if blocks is None:
            wanted = -(-(request.num_computed_tokens + num_hits + num_tokens) // self.config.block_size)
            wanted -= len(self._kv.get_block_ids(request.request_id)[0])
            usable = self._kv.pool.num_blocks - 1
            raise CacheFull(
                f"{wanted} blocks wanted, {self._kv.pool.num_free} of {usable} free. "
                "Close a sequence, or raise CacheConfig.num_blocks."
            )


def _num_blocks(config: CacheConfig) -> int:
    if config.num_blocks is None:
        raise ValueError("CacheConfig.num_blocks must be set: how many blocks shall the KV array have?")
    return config.num_blocks

"""One request as the cache sees it: its tokens, what else its content depends on, and how far it got."""

import enum
import hashlib
import operator
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxcache.core.hashing import (
    BlockHash,
    BlockHasher,
    ExtraKeys,
    MultiModalFeature,
    generate_block_hash_extra_keys,
)

MAX_TOKEN_ID = 2**31 - 1

RETENTIONS = ("default", "low", "none")
"""What a request leaves in the cache: as long as the eviction policy keeps it; only until there is need of room,
before anything else goes; or nothing."""


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


def pack_token_ids(token_ids: Iterable[int], vocab_size: int | None = None, what: str = "prompt") -> array:
    """Token ids of any integer container as one `array("I")`.

    A `ValueError` for anything that is not an integer (bools included) or not in `[0, vocab_size)`.
    """
    limit = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    if not isinstance(token_ids, Iterable):
        raise ValueError(f"{what} must be token ids in a sequence, got {type(token_ids).__name__}")
    if hasattr(token_ids, "dtype"):
        packed = _pack_array(np.asarray(token_ids), what, limit)
    else:
        packed = _pack_sequence(token_ids if isinstance(token_ids, list) else list(token_ids), what, limit)
    view = np.frombuffer(packed, np.uint32)
    if len(view) and view.max() >= limit:
        at = int(np.argmax(view >= limit))
        raise ValueError(f"{what} token {at} is {view[at]}: token ids must lie in [0, {limit})")
    return packed


def _pack_array(values: np.ndarray, what: str, limit: int) -> array:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(
            f"{what} must be a one-dimensional array of integers, got shape {values.shape} of {values.dtype}"
        )
    if len(values) and (values.min() < 0 or values.max() > MAX_TOKEN_ID):
        at = int(np.argmax((values < 0) | (values > MAX_TOKEN_ID)))
        raise ValueError(f"{what} token {at} is {values[at]}: token ids must lie in [0, {limit})")
    packed = array("I")
    packed.frombytes(np.ascontiguousarray(values, np.int32).tobytes())
    return packed


def _pack_sequence(values: list[Any], what: str, limit: int) -> array:
    try:
        packed = array("I", values)  # three times as fast as array("i", ...)
    except (TypeError, OverflowError):
        at, value = next((i, v) for i, v in enumerate(values) if not _is_token_id(v))
        raise ValueError(f"{what} token {at} is {value!r}: token ids must be integers in [0, {limit})") from None
    # `array` takes True for 1: only ids 0 and 1 can have been bools.
    for at in np.flatnonzero(np.frombuffer(packed, np.uint32) <= 1).tolist():
        if isinstance(values[at], bool | np.bool_):
            raise ValueError(f"{what} token {at} is {values[at]!r}: token ids must be integers, not bools")
    return packed


def _is_token_id(value: Any) -> bool:
    integral = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return integral and 0 <= int(value) <= MAX_TOKEN_ID


def check_text(what: str, value: Any) -> None:
    """A `ValueError` unless `value` is text that has bytes, which fingerprints and events are made of."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is no valid Unicode text: {error.reason} at character {error.start}") from None


def check_retention(value: Any) -> str:
    """`value`; a `ValueError` unless it is one of `RETENTIONS`."""
    if value not in RETENTIONS:
        raise ValueError(f"cache_retention must be one of {', '.join(RETENTIONS)}, got {value!r}")
    return value


def check_features(features: Sequence[MultiModalFeature], num_tokens: int) -> tuple[MultiModalFeature, ...]:
    """`features` as a tuple; a `ValueError` unless they are named, in order, apart and inside the prompt."""
    end = 0
    checked = []
    for nth, feature in enumerate(features):
        try:
            identifier, offset, length = feature
            offset, length = operator.index(offset), operator.index(length)
        except (TypeError, ValueError):
            raise ValueError(
                f"feature {nth} must be (identifier, offset, length) with integers of tokens, got {feature!r}"
            ) from None
        if not isinstance(identifier, str) or not identifier:
            raise ValueError(f"feature {nth} needs an identifier derived from its content, got {identifier!r}")
        check_text(f"the identifier of feature {nth}", identifier)
        if length <= 0 or offset < 0 or offset + length > num_tokens:
            raise ValueError(
                f"feature {nth} ({identifier!r}) covers tokens [{offset}, {offset + length}), but the prompt has "
                f"[0, {num_tokens}) and a feature at least one token"
            )
        if offset < end:
            raise ValueError(
                f"feature {nth} ({identifier!r}) begins at token {offset}, but the one before ends at {end}: "
                "sort features by offset, and let them not overlap"
            )
        end = offset + length
        checked.append(MultiModalFeature(identifier, offset, length))
    return tuple(checked)


class Request:
    """Tokens, identity and progress of one request. Made once, then changed only by scheduler and engine.

    A block is shared only between requests of equal `namespace` (adapter and salt) whose tokens, features and
    embeddings are equal from the start up to the block's end.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int] | None = None,
        *,
        max_tokens: int = 16,
        adapter: str | None = None,
        adapter_id: int | None = None,
        features: Sequence[MultiModalFeature] = (),
        cache_salt: str | None = None,
        prompt_embeds: np.ndarray | None = None,
        prompt_logprobs: int | None = None,
        pooling: str | None = None,
        skip_reading_prefix_cache: bool | None = None,
        skip_writing_prefix_cache: bool = False,
        cache_retention: str = "default",
        priority: int = 0,
        arrival_time: float | None = None,
        vocab_size: int | None = None,
        block_hasher: BlockHasher | None = None,
    ) -> None:
        if cache_salt is not None:
            check_text("cache_salt", cache_salt)
        if adapter is not None:
            check_text("adapter", adapter)
        if not isinstance(priority, int | np.integer) or isinstance(priority, bool):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        self.request_id = request_id
        self.prompt_embeds = prompt_embeds
        if prompt_token_ids is None:
            if prompt_embeds is None:
                raise ValueError("a request needs prompt_token_ids or prompt_embeds")
            prompt_token_ids = np.zeros(len(prompt_embeds), np.int32)
        self.all_token_ids = pack_token_ids(prompt_token_ids, vocab_size)
        self.num_prompt_tokens = len(self.all_token_ids)
        if not self.num_prompt_tokens:
            raise ValueError("the prompt is empty: give at least one token")
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.adapter = adapter
        self.adapter_id = adapter_id
        """Which weights go by that name: another one for each time an adapter is loaded or replaced."""
        self.features = check_features(features, self.num_prompt_tokens)
        self.cache_salt = cache_salt or None
        self.prompt_logprobs = prompt_logprobs
        self.pooling = pooling
        self._skip_reading = skip_reading_prefix_cache
        self.cache_retention = check_retention(cache_retention)
        self.skip_writing_prefix_cache = skip_writing_prefix_cache or cache_retention == "none"
        """Whether its blocks are never named, so that nobody finds them."""
        self.priority = priority
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        """Tokens taken from the cache when it was first admitted; `None` until then."""
        self.num_found_tokens = 0
        """The same of its latest admission."""
        self.quiet_until = 0
        """Up to so many computed tokens its blocks need no change (`KVCacheManager.allocate_slots`)."""
        self.num_preemptions = 0
        self.error: str | None = None

        self.block_hasher = block_hasher
        self.records: dict[int, list[Any]] = {}
        """`HashIndex`'s exact records of this request's blocks, by block size."""
        self._block_hashes: list[BlockHash] = []
        self._extra_keys: dict[int, tuple[list[ExtraKeys | None], int]] = {}
        """By block size: the keys of the first blocks, and the first feature that is not finished there."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :].tolist()

    @property
    def namespace(self) -> tuple[str | None, int | None, str | None]:
        """Requests of different namespaces never share a block."""
        return (self.adapter, self.adapter_id, self.cache_salt)

    @property
    def has_embeds(self) -> bool:
        return self.prompt_embeds is not None

    def embeds_digest(self, start: int, end: int) -> bytes | None:
        """SHA-256 of the bytes of the prompt embeddings of tokens `[start, end)`; `None` without embeddings."""
        if self.prompt_embeds is None:
            return None
        return hashlib.sha256(np.ascontiguousarray(self.prompt_embeds[start:end]).tobytes()).digest()

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Of all full blocks, brought up to date when asked for; empty without a hasher."""
        self.update_block_hashes()
        return self._block_hashes

    @property
    def block_extra_keys(self) -> list[ExtraKeys | None]:
        """What entered each of the `block_hashes` besides tokens."""
        if self.block_hasher is None:
            return []
        return self.extra_keys(self.block_hasher.block_size, len(self._block_hashes))

    def extra_keys(self, block_size: int, num_blocks: int) -> list[ExtraKeys | None]:
        """What the content of each of the first `num_blocks` blocks depends on besides tokens (see `hashing`)."""
        if not self.has_extra_keys:
            return [None] * num_blocks
        keys, feature = self._extra_keys.get(block_size, ([], 0))
        for start in range(len(keys) * block_size, num_blocks * block_size, block_size):
            one, feature = generate_block_hash_extra_keys(self, start, start + block_size, feature)
            keys.append(one)
        self._extra_keys[block_size] = keys, feature
        return keys[:num_blocks]

    @property
    def has_extra_keys(self) -> bool:
        return bool(self.adapter or self.cache_salt or self.features or self.has_embeds)

    @property
    def only_tokens(self) -> bool:
        """Whether within its namespace the content of its blocks depends on tokens alone."""
        return not self.features and self.prompt_embeds is None

    def append_output_token_ids(self, token_ids: int | Iterable[int]) -> None:
        """Append generated tokens; a `ValueError`, with nothing appended, as in `pack_token_ids`."""
        if type(token_ids) is int and 0 <= token_ids < (self.vocab_size or MAX_TOKEN_ID + 1):  # once per token
            self.all_token_ids.append(token_ids)
            return
        several = token_ids if isinstance(token_ids, Iterable) else (token_ids,)
        self.all_token_ids.extend(pack_token_ids(several, self.vocab_size, "output"))

    def check_kept(self, num_tokens: int) -> None:
        """A `ValueError` unless the request can be cut to `num_tokens` tokens."""
        if (
            not isinstance(num_tokens, int)
            or isinstance(num_tokens, bool)
            or not 0 < num_tokens <= self.num_tokens
        ):
            raise ValueError(f"cannot keep {num_tokens!r} of {self.num_tokens} tokens")

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens past the first `num_tokens`, and the hashes of the blocks that they were in."""
        self.check_kept(num_tokens)
        del self.all_token_ids[num_tokens:]
        self.num_prompt_tokens = min(self.num_prompt_tokens, num_tokens)
        if self.block_hasher is not None:
            del self._block_hashes[num_tokens // self.block_hasher.block_size :]
        for block_size, (keys, _) in self._extra_keys.items():
            self._extra_keys[block_size] = keys[: num_tokens // block_size], 0
        for block_size, records in self.records.items():
            del records[num_tokens // block_size :]

    def update_block_hashes(self) -> None:
        """Hash the full blocks that have no hash yet. Without a hasher there are none."""
        if self.block_hasher is None:
            return
        done, full = len(self._block_hashes), self.num_tokens // self.block_hasher.block_size
        if done < full:
            self._block_hashes += self.block_hasher(self, self._block_hashes[-1] if done else None, done)

    def get_skip_reading_prefix_cache(self) -> bool:
        """Whether every prompt position must be computed, so that nothing may be taken from the cache.

        What the request says; else prompt logprobs and pooling over all tokens need it.
        """
        if self._skip_reading is not None:
            return self._skip_reading
        return self.prompt_logprobs is not None or self.pooling in ("mean", "all")

    def __lt__(self, other: "Request") -> bool:
        """The order of priority scheduling: smaller priority first, then arrival, then id."""
        mine = (self.priority, self.arrival_time, self.request_id)
        return mine < (other.priority, other.arrival_time, other.request_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_computed_tokens} of "
            f"{self.num_tokens} tokens computed)"
        )

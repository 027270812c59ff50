"""Content fingerprints of token blocks, byte-identical to those of vLLM 0.25.1.

    hash(block i) = H((hash(block i-1) or root, token ids, extra keys or None))

`H` serialises that 3-tuple and takes a digest. The serialisers are Python's pickle protocol 5 and canonical CBOR
(RFC 8949, section 4.2.3); the digests SHA-256 (FIPS 180-4, 32 bytes) and XXH3-128 (16 bytes, big-endian).
"""

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cbor2
import numpy as np
import xxhash

BlockHash = bytes
HashFunction = Callable[[Any], bytes]

FIXED_ROOT = hashlib.sha256(b"jaxcache: root of all block hashes").digest()
"""The root of the sha256 kinds where no seed is given, so that two processes agree."""


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def _canonical_cbor(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASH_FUNCTIONS: dict[str, HashFunction] = {
    "sha256": lambda value: _sha256(_pickled(value)),
    "sha256_cbor": lambda value: _sha256(_canonical_cbor(value)),
    "xxhash": lambda value: xxhash.xxh3_128_digest(_pickled(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(_canonical_cbor(value)),
}
"""xxhash is not collision-resistant against somebody who chooses the tokens; a hit is compared in full anyway."""


def get_hash_function(name: str) -> HashFunction:
    """The hash function called `name`; a `ValueError` for an unknown one."""
    try:
        return HASH_FUNCTIONS[name]
    except (KeyError, TypeError):
        raise ValueError(
            f"unknown prefix_caching_hash_algo {name!r}: choose one of {', '.join(HASH_FUNCTIONS)}"
        ) from None


def root_hash(algorithm: str, hash_seed: str | None = None) -> BlockHash:
    """What stands in for the parent of a first block.

    `H(seed)` for the seed string given, or for the environment's PYTHONHASHSEED where it is set. Without either,
    `FIXED_ROOT` for the sha256 kinds, and 32 random bytes for the xxhash kinds.
    """
    function = get_hash_function(algorithm)
    if hash_seed is None:
        hash_seed = os.environ.get("PYTHONHASHSEED")
    if hash_seed is not None:
        if not isinstance(hash_seed, str):
            raise ValueError(f"hash_seed must be a string, got {hash_seed!r}: write hash_seed={str(hash_seed)!r}")
        return function(hash_seed)
    return FIXED_ROOT if algorithm.startswith("sha256") else os.urandom(32)


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: BlockHash,
    token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHash:
    """The hash of one full block. `parent_block_hash` is the root for a first block."""
    return hash_function((parent_block_hash, tuple(token_ids), extra_keys))


class MultiModalFeature(NamedTuple):
    """Something other than text that stands on placeholder tokens `[offset, offset + length)`."""

    identifier: str
    """Derived from the content: equal identifiers mean equal content."""
    offset: int
    length: int


def content_identifier(content: np.ndarray, kind: str = "") -> str:
    """An identifier for `content`: SHA-256 over `kind`, dtype, shape and bytes, in hexadecimal.

    Equal bytes of another shape or dtype are another content. `kind` says what else tells contents apart: the mode
    or palette of an image, how it was decoded, which encoder made it.
    """
    array = np.asarray(content)
    if array.dtype.hasobject:
        raise ValueError(f"content must be an array of numbers, got one of {array.dtype}")
    if not isinstance(kind, str):
        raise ValueError(f"kind must be a string, got {kind!r}")
    header = cbor2.dumps([kind, _dtype_name(array.dtype), list(array.shape)], canonical=True)
    return hashlib.sha256(header + np.ascontiguousarray(array).tobytes()).hexdigest()


def _dtype_name(dtype: np.dtype) -> str:
    """With the byte order; types that numpy does not know itself (bfloat16, ...) have one name of their own."""
    return dtype.name if dtype.kind == "V" and dtype.names is None else dtype.str


class ExtraKeys(NamedTuple):
    """What besides its tokens a block's content depends on, each as its own kind.

    The adapter and the salt are the request's (`Request.namespace`); they are repeated here only for hashing.
    """

    adapter: str | None
    features: tuple[tuple[str, int], ...]
    """(identifier, offset relative to the block's start: negative where the feature began before it)"""
    salt: str | None
    embeds: bytes | None
    """SHA-256 of the prompt embeddings that fall into the block."""

    def flat(self) -> tuple[Any, ...] | None:
        """As the reference hashes them: adapter, features, salt, embeddings; `None` where there are none.

        Strings and bytes are copied, so that pickle never finds one object twice and refers back to it: the hash
        depends on their values alone. (One-character strings are single objects in CPython, here as there.)
        """
        keys: list[Any] = [_copy(self.adapter)] if self.adapter else []
        keys += [(_copy(identifier), offset) for identifier, offset in self.features]
        if self.salt:
            keys.append(_copy(self.salt))
        if self.embeds is not None:
            keys.append(bytes(bytearray(self.embeds)))
        return tuple(keys) or None


def _copy(text: str | None) -> str:
    return (f"{text} ")[:-1]


def generate_block_hash_extra_keys(
    request: Any, start: int, end: int, first_feature: int = 0
) -> tuple[ExtraKeys | None, int]:
    """The extra keys of `request`'s tokens `[start, end)`, and the first feature that is not finished there.

    `request` has `adapter`, `cache_salt`, `features` (sorted by offset) and `embeds_digest(start, end)`.
    `first_feature` is what the call for the block before returned.
    """
    features = []
    upcoming = first_feature
    for index in range(first_feature, len(request.features)):
        identifier, offset, length = request.features[index]
        if offset >= end:
            break
        if offset + length > start:
            features.append((identifier, offset - start))
        if offset + length <= end:
            upcoming = index + 1
    keys = ExtraKeys(
        adapter=request.adapter,
        features=tuple(features),
        salt=request.cache_salt if start == 0 else None,
        embeds=request.embeds_digest(start, end),
    )
    return (None if keys == _NO_KEYS else keys), upcoming


_NO_KEYS = ExtraKeys(None, (), None, None)


class BlockHasher(NamedTuple):
    """Hashes the full blocks of a request."""

    block_size: int
    hash_function: HashFunction
    root: BlockHash

    def __call__(self, request: Any, parent: BlockHash | None = None, start: int = 0) -> list[BlockHash]:
        """The hashes of `request`'s full blocks from block `start` on, `parent` being that of the block before.

        `request` has `all_token_ids`, `num_tokens` and `extra_keys(block_size, num_blocks)`.
        """
        size, hash_function, root = self
        stop = request.num_tokens // size
        keys = request.extra_keys(size, stop)
        parent = root if parent is None else parent
        hashes: list[BlockHash] = []
        for nth in range(start, stop):
            flat = keys[nth].flat() if keys[nth] else None
            tokens = request.all_token_ids[nth * size : (nth + 1) * size]
            parent = hash_block_tokens(hash_function, parent, tokens, flat)
            hashes.append(parent)
        return hashes


def get_request_block_hasher(
    block_size: int, algorithm: str = "sha256", hash_seed: str | None = None
) -> BlockHasher:
    """A hasher of blocks of `block_size` tokens; a `ValueError` unless that is a positive integer."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size <= 0:
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")
    return BlockHasher(block_size, get_hash_function(algorithm), root_hash(algorithm, hash_seed))


def block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> bytes:
    """The key of a block of one KV-cache group: the hash, then the group as 4 bytes big-endian."""
    return block_hash + group_id.to_bytes(4, "big")


def split_group_id(key: bytes) -> tuple[BlockHash, int]:
    """The hash and the group that `block_hash_with_group_id` made `key` of."""
    return key[:-4], int.from_bytes(key[-4:], "big")


def external_block_hash(block_hash: BlockHash) -> int:
    """How the outside may know a block: its hash's last 8 bytes as an unsigned big-endian integer."""
    return int.from_bytes(block_hash[-8:], "big")

"""How many blocks, and how long a sequence may be, where the user does not say."""

from bisect import bisect_right
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.core.specs import KVCacheGroup
from jaxcache.engine.groups import block_bytes, kv_cache_groups
from jaxcache.engine.runner import ModelConfigLike
from jaxcache.kernels import layout

CPU_KV_BYTES = 1 << 30
"""Memory for KV on a CPU, where JAX does not say how much there is."""
DEVICE_SHARE = 0.85
"""Share of an accelerator's free memory that KV takes."""


@dataclass(frozen=True)
class Sizes:
    num_blocks: int
    max_model_len: int
    kv_dtype: jnp.dtype


def choose_sizes(model: ModelConfigLike, cache: CacheConfig, scheduler: SchedulerConfig) -> Sizes:
    """Sizes for `model`; a `ValueError`, at construction, where what was asked does not go together."""
    kv_dtype = layout.kv_dtype(default_dtype() if cache.kv_cache_dtype is None else cache.kv_cache_dtype)
    num_blocks = cache.num_blocks or max(2, kv_memory() // block_bytes(model, cache.block_size, kv_dtype))
    groups = kv_cache_groups(model, cache.block_size)
    capacity = _longest(groups, num_blocks - 1, model.max_position, scheduler.max_num_batched_tokens)
    limit = scheduler.max_model_len
    if limit is None:
        if capacity == 0:
            raise ValueError(
                f"{num_blocks} blocks hold no sequence of this model's {len(groups)} KV-cache groups: raise "
                "CacheConfig.num_blocks"
            )
        limit = capacity
    elif limit > model.max_position:
        raise ValueError(
            f"max_model_len {limit} is more than the {model.max_position} positions this model was made for"
        )
    elif limit > capacity:
        raise ValueError(
            f"max_model_len {limit} needs {_blocks(groups, limit, scheduler.max_num_batched_tokens)} blocks of "
            f"{cache.block_size} tokens, but the pool has {num_blocks - 1} usable ones: "
            "raise CacheConfig.num_blocks, or lower max_model_len"
        )
    return Sizes(num_blocks, limit, kv_dtype)


def _blocks(groups: tuple[KVCacheGroup, ...], num_tokens: int, max_num_batched_tokens: int) -> int:
    return sum(group.spec.max_blocks(num_tokens, max_num_batched_tokens) for group in groups)


def _longest(groups: tuple[KVCacheGroup, ...], num_blocks: int, at_most: int, max_num_batched_tokens: int) -> int:
    """The longest sequence, in tokens, that `num_blocks` blocks hold in all groups together."""
    lengths = range(1, at_most + 1)
    return bisect_right(lengths, num_blocks, key=lambda n: _blocks(groups, n, max_num_batched_tokens))


def default_dtype() -> jnp.dtype:
    """float32 on CPUs, whose matrix units have no narrower type, bfloat16 elsewhere."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def kv_memory() -> int:
    """Bytes to spend on KV on the default device."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return CPU_KV_BYTES
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * DEVICE_SHARE)

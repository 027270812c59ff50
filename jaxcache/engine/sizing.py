"""How many blocks, and how long a sequence may be, where the user does not say."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.engine.runner import ModelConfigLike
from jaxcache.kernels.layout import KVLayout

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
    kv_dtype = jnp.dtype(cache.kv_cache_dtype or default_dtype())
    layout = KVLayout(model.num_kv_heads, model.head_dim, cache.block_size)
    block_bytes = layout.block_bytes(model.num_layers, kv_dtype)
    num_blocks = cache.num_blocks or max(2, kv_memory() // block_bytes)
    capacity = (num_blocks - 1) * cache.block_size
    limit = scheduler.max_model_len
    if limit is None:
        limit = min(model.max_position, capacity)
    elif limit > model.max_position:
        raise ValueError(
            f"max_model_len {limit} is more than the {model.max_position} positions this model was made for"
        )
    elif limit > capacity:
        raise ValueError(
            f"max_model_len {limit} needs {-(-limit // cache.block_size)} blocks of {cache.block_size} tokens, "
            f"but the pool has {num_blocks - 1} usable ones: raise CacheConfig.num_blocks, or lower max_model_len"
        )
    return Sizes(num_blocks, limit, kv_dtype)


def default_dtype() -> jnp.dtype:
    """float32 on CPUs, whose matrix units have no narrower type, bfloat16 elsewhere."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def kv_memory() -> int:
    """Bytes to spend on KV on the default device."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return CPU_KV_BYTES
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * DEVICE_SHARE)

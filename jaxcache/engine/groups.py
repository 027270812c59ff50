"""From a model's layers to what the cache must keep for them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcache.core.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    RecurrentSpec,
    SlidingWindowSpec,
)
from jaxcache.kernels.layout import KVLayout, init_kv
from jaxcache.models.config import ModelConfig
from jaxcache.models.grouping import LayerKind
from jaxcache.models.recurrent import HybridCache, init_state, state_bytes


def kv_cache_groups(config: Any, block_size: int) -> tuple[KVCacheGroup, ...]:
    """The groups of a model's layers; one of full attention for a config that does not speak of layer kinds."""
    if not isinstance(config, ModelConfig):
        return (KVCacheGroup(FullAttentionSpec(block_size), tuple(range(config.num_layers))),)
    return tuple(
        KVCacheGroup(_spec(config.layer_kinds[layers[0]], block_size), layers) for layers in config.layer_groups
    )


def _spec(kind: LayerKind, block_size: int) -> KVCacheSpec:
    match kind.kind:
        case "full":
            return FullAttentionSpec(block_size)
        case "sliding_window":
            return SlidingWindowSpec(block_size, _size(kind))
        case "chunked_local":
            return ChunkedLocalAttentionSpec(block_size, _size(kind))
        case "recurrent":
            return RecurrentSpec(block_size)
    raise ValueError(f"no cache is known for layers of kind {kind.kind!r}")


def _size(kind: LayerKind) -> int:
    if kind.size is None:
        raise ValueError(f"layers of kind {kind.kind!r} need a size")
    return kind.size


def block_bytes(config: Any, block_size: int, kv_dtype: jax.typing.DTypeLike) -> int:
    """Bytes of one block over all layers of a group; every group's blocks lie in the same array."""
    layout = KVLayout(config.num_kv_heads, config.head_dim, block_size)
    if not isinstance(config, ModelConfig):
        return layout.block_bytes(config.num_layers, kv_dtype)
    return layout.block_bytes(config.kv_layers, kv_dtype) + state_bytes(config, state_dtype(kv_dtype))


def make_cache(config: Any, num_blocks: int, block_size: int, kv_dtype: jax.typing.DTypeLike) -> Any:
    """The zeroed arrays that steps read and write: a `KVCache`, and recurrent state where there is any."""
    layout = KVLayout(config.num_kv_heads, config.head_dim, block_size)
    if not isinstance(config, ModelConfig):
        return init_kv(layout, config.num_layers, num_blocks, kv_dtype)
    kv = init_kv(layout, config.kv_layers, num_blocks, kv_dtype)
    if not config.state_layers:
        return kv
    return HybridCache(kv, init_state(config, num_blocks, state_dtype(kv_dtype)))


def state_dtype(kv_dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Recurrent state is never kept in less than 16 bits: its errors add up."""
    dtype = jnp.dtype(kv_dtype)
    return dtype if dtype.itemsize >= 2 else jnp.dtype(jnp.bfloat16)

"""Arguments that several operations share, checked before a backend sees them."""

import operator

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxcache.kernels.layout import KVCache, KVLayout


def check_float(name: str, value: jax.Array, rank: int) -> None:
    """`value` is an array of token rows in a dtype that attention computes with."""
    if value.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes [tokens, heads, head_dim], got shape {value.shape}")
    if value.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {value.dtype}")


def check_kv(kv: KVCache, head_dim: int) -> KVLayout:
    """The layout of `kv`, whose parts must fit together."""
    if kv.data.ndim != 6:
        raise ValueError(
            "kv.data must be [layers, blocks, kv_heads, planes, block_size, lanes], "
            f"got shape {kv.data.shape}: make it with init_kv"
        )
    layout = KVLayout.of(kv, head_dim)
    wanted = (*kv.data.shape[:2], *layout.scale_shape) if kv.data.dtype == jnp.int8 else None
    found = None if kv.scales is None else kv.scales.shape
    if found != wanted:
        raise ValueError(
            f"kv.scales must be {wanted} for {kv.data.dtype} KV, got {found}: make the pair with init_kv"
        )
    return layout


def check_rows(kv: KVCache, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> None:
    """`k`, `v` and their slots go together and fit `kv`."""
    check_float("k", k, rank=3)
    layout = check_kv(kv, k.shape[-1])
    if k.shape[1] != layout.num_kv_heads:
        raise ValueError(f"k {k.shape} has {k.shape[1]} heads, but the KV array has {layout.num_kv_heads}")
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"v is {v.dtype}{v.shape}, but k is {k.dtype}{k.shape}: they must be alike")
    if slot_mapping.shape != k.shape[:1] or not jnp.issubdtype(slot_mapping.dtype, jnp.integer):
        raise ValueError(
            f"slot_mapping must be one integer per row of k, shape {k.shape[:1]}, "
            f"got {slot_mapping.dtype}{slot_mapping.shape}"
        )


def check_layer(layer: object, kv: KVCache) -> Int[Array, ""]:
    """`layer` as an int32 scalar. Under jit its value is unknown: out of range is then the caller's fault."""
    if isinstance(layer, Tracer):
        if layer.ndim or not jnp.issubdtype(layer.dtype, jnp.integer):
            raise ValueError(f"layer must be an integer scalar, got {layer.dtype}{layer.shape}")
        return layer.astype(jnp.int32)
    try:
        index = operator.index(layer)  # pyright: ignore[reportArgumentType]  # a scalar array has __index__
    except TypeError as error:
        raise ValueError(f"layer must be an integer, got {layer!r}") from error
    if not 0 <= index < kv.data.shape[0]:
        raise ValueError(f"layer {index} is not one of the {kv.data.shape[0]} layers of the KV array")
    return jnp.int32(index)

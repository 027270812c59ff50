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
    layers, blocks, heads, _, block_size, _ = kv.data.shape
    wanted = (layers, blocks, heads, 2, block_size) if kv.data.dtype == jnp.int8 else None
    found = None if kv.scales is None else kv.scales.shape
    if found != wanted:
        raise ValueError(
            f"kv.scales must be {wanted} for {kv.data.dtype} KV, got {found}: make the pair with init_kv"
        )
    return layout


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

"""From K and V rows to what the KV array stores, and back."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxcache.kernels.layout import KVCache, KVLayout

INT8_MAX = 127.0


def pack_rows(
    k: Float[Array, "T H D"], v: Float[Array, "T H D"], layout: KVLayout, dtype: jax.typing.DTypeLike
) -> tuple[Shaped[Array, "T H P L"], Float[Array, "T H 2"] | None]:
    """Rows as they are stored, and their int8 scales (`None` for the other dtypes).

    A value beyond the range of a narrower float becomes the largest finite one, not inf or NaN.
    int8 is symmetric with one f32 scale per token, head and K or V: `scale = max |x| / 127`.
    """
    dtype = jnp.dtype(dtype)
    kv = jnp.stack([k, v], axis=2)
    scales = None
    if dtype == jnp.int8:
        wide = kv.astype(jnp.float32)
        scales = jnp.max(jnp.abs(wide), axis=-1) / INT8_MAX
        kv = jnp.round(wide / jnp.where(scales > 0, scales, 1.0)[..., None]).astype(jnp.int8)
    elif jnp.finfo(dtype).max < jnp.finfo(kv.dtype).max:
        limit = float(jnp.finfo(dtype).max)
        kv = jnp.clip(kv.astype(jnp.float32), -limit, limit).astype(dtype)
    else:
        kv = kv.astype(dtype)
    tokens, heads = kv.shape[:2]
    if not layout.side_by_side:
        kv = jnp.pad(kv, ((0, 0), (0, 0), (0, 0), (0, layout.lanes - layout.head_dim)))
    return kv.reshape(tokens, heads, layout.planes, layout.lanes), scales


def unpack_blocks(
    blocks: Shaped[Array, "... N H P S L"],
    scales: Float[Array, "... N 1 X"] | None,
    layout: KVLayout,
    dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "... H N*S D"], Float[Array, "... H N*S D"]]:
    """K and V of `N` consecutive blocks of a sequence, head by head, as `dtype`."""
    heads_first = jnp.moveaxis(blocks, -5, -3)  # [..., H, P, N, S, L]
    flat = lax.collapse(heads_first, heads_first.ndim - 3, heads_first.ndim - 1)
    if layout.side_by_side:
        k, v = flat[..., 0, :, : layout.head_dim], flat[..., 0, :, layout.head_dim :]
    else:
        k, v = flat[..., 0, :, : layout.head_dim], flat[..., 1, :, : layout.head_dim]
    if scales is None:
        return k.astype(dtype), v.astype(dtype)
    by_head = scales.reshape(*scales.shape[:-2], layout.num_kv_heads, 2, layout.block_size)
    per_token = jnp.moveaxis(by_head, -4, -2)  # [..., H, 2, N, S]
    per_token = lax.collapse(per_token, per_token.ndim - 2)
    k = k.astype(jnp.float32) * per_token[..., 0, :, None]
    v = v.astype(jnp.float32) * per_token[..., 1, :, None]
    return k.astype(dtype), v.astype(dtype)


def product_dtype(q: jax.Array, kv: KVCache) -> jnp.dtype:
    """Of matrix products: that of q where KV has the same or is narrower than 16 bits; f32 where they disagree."""
    if kv.data.dtype.itemsize == 1 or kv.data.dtype == q.dtype:
        return q.dtype
    return jnp.dtype(jnp.float32)

"""The oracle: every row against its sequence's whole block table, in f32, in one go. Ignores the tile list."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcache.kernels.layout import NULL_BLOCK, KVCache, KVLayout
from jaxcache.kernels.packing import unpack_blocks
from jaxcache.kernels.step import StepInputs

SMALLEST_PEAK = -1e30
"""Below any score: keeps a row that sees nothing from becoming -inf minus -inf."""


def paged_attention(
    q: Float[Array, "T N D"],
    kv: KVCache,
    layer: Int[Array, ""],
    step: StepInputs,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N D"]:
    """As `api.paged_attention`; rows that see nothing are zero."""
    layout = KVLayout.of(kv, q.shape[-1])
    rows, heads, _ = q.shape
    row = jnp.arange(rows)
    seq = jnp.searchsorted(step.query_start, row, side="right") - 1
    real = row < step.query_start[-1]
    seq = jnp.where(real, seq, 0)

    tables = step.block_tables
    held = (tables > NULL_BLOCK) & (tables < kv.data.shape[1])
    blocks = jnp.where(held, tables, NULL_BLOCK)
    scales = None if kv.scales is None else kv.scales[layer][blocks]
    k, v = unpack_blocks(kv.data[layer][blocks], scales, layout, jnp.float32)  # [S, H, C, D]

    j = jnp.arange(k.shape[-2])[None, :]
    i = step.positions[:, None]
    sees = real[:, None] & jnp.repeat(held, layout.block_size, axis=1)[seq] & (j <= i)
    sees &= j < step.seq_lens[seq][:, None]
    if sliding_window is not None:
        sees &= j > i - sliding_window
    sees = sees[:, None, :]

    of_kv_head = jnp.arange(heads) // (heads // layout.num_kv_heads)
    k, v = k[seq][:, of_kv_head], v[seq][:, of_kv_head]  # [T, N, C, D]
    high = lax.Precision.HIGHEST
    scores = jnp.einsum("tnd,tncd->tnc", q.astype(jnp.float32), k, precision=high) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(sees, scores, -jnp.inf)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], (rows, heads, 1))
        scores = jnp.concatenate([scores, extra], axis=-1)
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=SMALLEST_PEAK)
    weights = jnp.exp(scores - peak)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    weights = weights[..., : k.shape[-2]]
    return jnp.einsum("tnc,tncd->tnd", weights, jnp.where(sees[..., None], v, 0.0), precision=high).astype(q.dtype)

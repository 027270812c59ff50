"""Attention of models whose tokens also see those after them. Nothing is cached: a step holds whole sequences."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcache.kernels.step import StepInputs


def bidirectional_attention(
    q: Float[Array, "T N D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    step: StepInputs,
    *,
    sm_scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N D"]:
    """Every row over all rows of its sequence that are less than `sliding_window` positions away; f32 inside.

    Options as in `paged_attention`. Scores are `[N, T, T]`: made for texts of some thousand tokens.
    """
    rows, heads, head_dim = q.shape
    row = jnp.arange(rows)
    seq = jnp.searchsorted(step.query_start, row, side="right")
    sees = seq[:, None] == seq[None, :]
    if sliding_window is not None:
        sees &= jnp.abs(step.positions[:, None] - step.positions[None, :]) < sliding_window
    per_kv_head = heads // k.shape[1]
    k, v = (jnp.repeat(part.astype(jnp.float32), per_kv_head, axis=1) for part in (k, v))
    high = lax.Precision.HIGHEST
    scores = jnp.einsum("tnd,cnd->ntc", q.astype(jnp.float32), k, precision=high)
    scores = scores * (head_dim**-0.5 if sm_scale is None else sm_scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(sees[None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32)[:, None, None] - peak)
    return jnp.einsum("ntc,cnd->tnd", weights / total, v, precision=high).astype(q.dtype)

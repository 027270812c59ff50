"""Layers that decoder families share. Weights are `[in, out]`; matrix products sum in f32.

Tensor parallelism cuts one axis of a weight, named beside each one. Q, K and V of one KV head lie together, so
that the cut goes between KV heads and the fused product needs no exchange of lanes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcache.kernels.dispatch import Implementation
from jaxcache.kernels.layout import KVCache
from jaxcache.kernels.paged_attention import write_and_attend
from jaxcache.kernels.step import StepInputs
from jaxcache.models.activations import ACTIVATIONS
from jaxcache.models.bidirectional import bidirectional_attention
from jaxcache.models.config import ModelConfig
from jaxcache.models.grouping import LayerKind
from jaxcache.models.rope import apply_rope

INIT_STD = 0.02


class LayerContext(NamedTuple):
    """What a layer of a step reads besides its input."""

    step: StepInputs
    """With the block tables and slots of the layer's group."""
    layer: int | Int[Array, ""]
    """The layer's place in the KV array, or in the array of states."""
    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]
    adapter: Int[Array, " T"] | None = None
    """The slot of each row's adapter, 0 for none; `None` where the model has no slots."""


class Linear(nnx.Module):
    """`x @ w + b` over the last `in_axes` axes of `x`; the weight is `[*in_shape, *out_shape]`."""

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        bias: bool,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_axes = len(in_shape)
        self.w = _matrix((*in_shape, *out_shape), dtype, rngs)
        self.b = nnx.Param(jnp.zeros(out_shape, dtype)) if bias else None
        self.slots: Any = None
        """Of adapters (`lora.AdapterSlots`), where there are any."""

    def __call__(self, x: Float[Array, "T ..."], adapter: Int[Array, " T"] | None = None) -> Float[Array, "T ..."]:
        contract = tuple(range(1, 1 + self.in_axes)), tuple(range(self.in_axes))
        y = lax.dot_general(x, self.w[...], (contract, ((), ())), preferred_element_type=jnp.float32)
        if self.b is not None:
            y = y + self.b[...].astype(jnp.float32)[None]
        if self.slots is not None and adapter is not None:
            y = y + self.slots(x, adapter)
        return y.astype(x.dtype)


def _matrix(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param((jax.random.normal(rngs.params(), shape) * INIT_STD).astype(dtype))


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last axis, f32 inside (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, shape: tuple[int, ...], eps: float, *, dtype: jax.typing.DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(shape, dtype))

    def __call__(self, x: Float[Array, "T *heads D"]) -> Float[Array, "T *heads D"]:
        return _unit_rms(x, self.eps).astype(x.dtype) * _like(self.scale[...], x)


class OffsetRMSNorm(nnx.Module):
    """Gemma's: `x / rms(x) * (1 + scale)`, all of it in f32."""

    def __init__(self, shape: tuple[int, ...], eps: float, *, dtype: jax.typing.DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.zeros(shape, dtype))

    def __call__(self, x: Float[Array, "T *heads D"]) -> Float[Array, "T *heads D"]:
        scale = 1.0 + self.scale[...].astype(jnp.float32)
        return (_unit_rms(x, self.eps) * _like(scale, x)).astype(x.dtype)


def _unit_rms(x: Float[Array, "..."], eps: float) -> Float[Array, "..."]:
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)


def _like(scale: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    return scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)


class Attention(nnx.Module):
    """Self-attention over paged KV: projections, norms of Q and K, RoPE, the two device calls, output projection.

    The fused weight is `[hidden, kv_heads, group + 2, head_dim]`: the query heads of a KV head, its K, its V; cut
    over `kv_heads`. The output weight is `[kv_heads, group, head_dim, hidden]`, cut over `kv_heads`; so are the
    sinks `[kv_heads, group]`. The norm's scale is `[group + 1, head_dim]`, the same for all query heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        *,
        norm: type[RMSNorm | OffsetRMSNorm] = RMSNorm,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        c = config
        if kind.kind not in ("full", "sliding_window"):
            raise ValueError(f"there is no attention for {kind.kind} layers, only full and sliding_window")
        self.group = c.num_heads // c.num_kv_heads
        self.sm_scale, self.soft_cap, self.causal = c.sm_scale, c.attention_soft_cap, c.causal
        self.sliding_window = kind.sliding_window
        fused = (c.num_kv_heads, self.group + 2, c.head_dim)
        self.qkv = Linear((c.hidden_size,), fused, bias=c.qkv_bias, dtype=dtype, rngs=rngs)
        heads = (c.num_kv_heads, self.group, c.head_dim)
        self.out = Linear(heads, (c.hidden_size,), bias=c.out_bias, dtype=dtype, rngs=rngs)
        self.qk_norm = norm((self.group + 1, c.head_dim), c.norm_eps, dtype=dtype) if c.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(heads[:2], dtype)) if c.sinks else None

    def __call__(
        self, x: Float[Array, "T D"], kv: KVCache, context: LayerContext, *, implementation: Implementation
    ) -> tuple[Float[Array, "T D"], KVCache]:
        fused = self.qkv(x, context.adapter)
        tokens, kv_heads, _, head_dim = fused.shape
        qk = fused[:, :, : self.group + 1]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        rotated = apply_rope(qk, context.cos, context.sin)
        q = rotated[:, :, : self.group].reshape(tokens, kv_heads * self.group, head_dim)
        k, v = rotated[:, :, self.group], fused[:, :, self.group + 1]
        scoring = {
            "sm_scale": self.sm_scale,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "sinks": None if self.sinks is None else self.sinks[...].reshape(-1),
        }
        if self.causal:
            at = (kv, context.layer, context.step)
            y, kv = write_and_attend(q, k, v, *at, implementation=implementation, **scoring)
        else:
            y = bidirectional_attention(q, k, v, context.step, **scoring)
        return self.out(y.reshape(tokens, kv_heads, self.group, head_dim), context.adapter), kv


class GatedMLP(nnx.Module):
    """`(act(x @ gate) * (x @ up)) @ down`; gate and up are one weight `[hidden, 2, inner]`, cut over `inner`."""

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.activation
        self.gate_up = Linear((hidden,), (2, inner), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear((inner,), (hidden,), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"], adapter: Int[Array, " T"] | None = None) -> Float[Array, "T D"]:
        both = self.gate_up(x, adapter)
        return self.down(ACTIVATIONS[self.activation](both[:, 0]) * both[:, 1], adapter)


class Experts(nnx.Module):
    """A gated MLP per expert, of which a router chooses a few for each token (https://arxiv.org/abs/2101.03961).

    `gate_up` is `[experts, hidden, 2, inner]` and `down` `[experts, inner, hidden]`, cut over `inner`. Rows are
    sorted by expert, so that each expert's product is one run of rows.
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        if config.experts is None:
            raise ValueError("the config has no experts")
        self.config, self.activation = config.experts, config.activation
        e, hidden = config.experts, config.hidden_size
        self.router = Linear((hidden,), (e.num_experts,), bias=e.bias, dtype=dtype, rngs=rngs)
        self.gate_up = _matrix((e.num_experts, hidden, 2, e.inner_size), dtype, rngs)
        self.down = _matrix((e.num_experts, e.inner_size, hidden), dtype, rngs)
        self.gate_up_b = nnx.Param(jnp.zeros((e.num_experts, 2, e.inner_size), dtype)) if e.bias else None
        self.down_b = nnx.Param(jnp.zeros((e.num_experts, hidden), dtype)) if e.bias else None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        c = self.config
        scores = self.router(x).astype(jnp.float32)
        best, chosen = lax.top_k(scores, c.experts_per_token)
        total = best if c.normalize else scores
        weights = jnp.exp(best - jax.nn.logsumexp(total, axis=-1, keepdims=True))

        order = jnp.argsort(chosen.reshape(-1))
        expert = chosen.reshape(-1)[order]
        sizes = jnp.bincount(expert, length=c.num_experts).astype(jnp.int32)
        gate_up = self.gate_up[...].reshape(c.num_experts, x.shape[1], 2 * c.inner_size)
        rows = _ragged(x[order // c.experts_per_token], gate_up, sizes).reshape(-1, 2, c.inner_size)
        if self.gate_up_b is not None:
            rows = rows + self.gate_up_b[...].astype(jnp.float32)[expert]
        rows = _ragged(self._gated(rows).astype(x.dtype), self.down[...], sizes)
        if self.down_b is not None:
            rows = rows + self.down_b[...].astype(jnp.float32)[expert]
        by_token = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
        return jnp.sum(by_token * weights[:, :, None], axis=1).astype(x.dtype)

    def _gated(self, rows: Float[Array, "N 2 I"]) -> Float[Array, "N I"]:
        gate, up = rows[:, 0], rows[:, 1]
        if not self.config.clamped:
            return ACTIVATIONS[self.activation](gate) * up
        limit = self.config.swiglu_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(self.config.swiglu_alpha * gate) * (up + 1.0)


def _ragged(
    rows: Float[Array, "N I"], weights: Float[Array, "E I O"], sizes: Int[Array, " E"]
) -> Float[Array, "N O"]:
    """The first `sizes[0]` rows times `weights[0]`, and so on; f32."""
    return lax.ragged_dot(rows, weights, sizes, preferred_element_type=jnp.float32)


class Embedding(nnx.Module):
    """`[vocab, hidden]`, cut over `vocab`: tokens to vectors, and vectors to logits (a head, tied or not)."""

    def __init__(self, vocab: int, hidden: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        self.table = _matrix((vocab, hidden), dtype, rngs)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.table[...][token_ids]

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """f32."""
        contract = (((1,), (1,)), ((), ()))
        return lax.dot_general(hidden, self.table[...], contract, preferred_element_type=jnp.float32)

"""Layers that decoder families share. Weights are `[in, out]`; matrix products sum in f32.

Tensor parallelism cuts one axis of a weight, named beside each one. Q, K and V of one KV head lie together, so
that the cut goes between KV heads and the fused product needs no exchange of lanes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcache.kernels.kv_write import write_kv
from jaxcache.kernels.layout import KVCache
from jaxcache.kernels.paged_attention import paged_attention
from jaxcache.kernels.step import StepInputs
from jaxcache.models.rope import apply_rope

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
"""Hugging Face's names."""

INIT_STD = 0.02


class StepContext(NamedTuple):
    """What every layer of a step reads besides its input."""

    step: StepInputs
    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]


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
        shape = (*in_shape, *out_shape)
        self.w = nnx.Param((jax.random.normal(rngs.params(), shape) * INIT_STD).astype(dtype))
        self.b = nnx.Param(jnp.zeros(out_shape, dtype)) if bias else None

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        contract = tuple(range(1, 1 + self.in_axes)), tuple(range(self.in_axes))
        y = lax.dot_general(x, self.w[...], (contract, ((), ())), preferred_element_type=jnp.float32)
        if self.b is not None:
            y = y + self.b[...].astype(jnp.float32)[None]
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale`, f32 inside (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, width: int, eps: float, *, dtype: jax.typing.DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, dtype))

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.scale[...][None, :]


class Attention(nnx.Module):
    """Self-attention over paged KV: projections, RoPE, the two device calls, output projection.

    The fused weight is `[hidden, kv_heads, group + 2, head_dim]`: the query heads of a KV head, its K, its V; cut
    over `kv_heads`. The output weight is `[kv_heads, group, head_dim, hidden]`, cut over `kv_heads`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.group = heads // kv_heads
        self.qkv = Linear((hidden,), (kv_heads, self.group + 2, head_dim), bias=bias, dtype=dtype, rngs=rngs)
        self.out = Linear((kv_heads, self.group, head_dim), (hidden,), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "T D"],
        kv: KVCache,
        layer: Int[Array, ""],
        context: StepContext,
        *,
        implementation: str | None,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        fused = self.qkv(x)
        tokens, kv_heads, _, head_dim = fused.shape
        rotated = apply_rope(fused[:, :, : self.group + 1], context.cos, context.sin)
        q = rotated[:, :, : self.group].reshape(tokens, kv_heads * self.group, head_dim)
        k, v = rotated[:, :, self.group], fused[:, :, self.group + 1]
        kv = write_kv(kv, layer, k, v, context.step.slot_mapping, implementation=implementation)
        y = paged_attention(q, kv, layer, context.step, implementation=implementation)
        return self.out(y.reshape(tokens, kv_heads, self.group, head_dim)), kv


class GatedMLP(nnx.Module):
    """`(act(x @ gate) * (x @ up)) @ down`; gate and up are one weight `[hidden, 2, inner]`, cut over `inner`."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: str,
        *,
        bias: bool,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.activation = activation
        self.gate_up = Linear((hidden,), (2, inner), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear((inner,), (hidden,), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        both = self.gate_up(x)
        return self.down(ACTIVATIONS[self.activation](both[:, 0]) * both[:, 1])


class Embedding(nnx.Module):
    """`[vocab, hidden]`, cut over `vocab`: tokens to vectors, and vectors to logits (a head, tied or not)."""

    def __init__(self, vocab: int, hidden: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param((jax.random.normal(rngs.params(), (vocab, hidden)) * INIT_STD).astype(dtype))

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.table[...][token_ids]

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """f32."""
        contract = (((1,), (1,)), ((), ()))
        return lax.dot_general(hidden, self.table[...], contract, preferred_element_type=jnp.float32)

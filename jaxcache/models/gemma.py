"""Gemma 2 (https://arxiv.org/abs/2408.00118) and the text models of Gemma 3 (https://arxiv.org/abs/2503.19786)."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxcache.kernels.dispatch import Implementation
from jaxcache.kernels.layout import KVCache
from jaxcache.models.config import ModelConfig
from jaxcache.models.convert import LayerParts, attention_part, mlp_part, norm_part
from jaxcache.models.decoder import Decoder
from jaxcache.models.grouping import LayerKind
from jaxcache.models.layers import Attention, GatedMLP, LayerContext, OffsetRMSNorm


class SandwichBlock(nnx.Module):
    """One decoder layer: attention and MLP, each between two norms and added to its input."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        def norm() -> OffsetRMSNorm:
            return OffsetRMSNorm((config.hidden_size,), config.norm_eps, dtype=dtype)

        self.attention_norm, self.after_attention_norm = norm(), norm()
        self.attention = Attention(config, kind, norm=OffsetRMSNorm, dtype=dtype, rngs=rngs)
        self.mlp_norm, self.after_mlp_norm = norm(), norm()
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "T D"], kv: KVCache, context: LayerContext, *, implementation: Implementation
    ) -> tuple[Float[Array, "T D"], KVCache]:
        y, kv = self.attention(self.attention_norm(x), kv, context, implementation=implementation)
        x = x + self.after_attention_norm(y)
        return x + self.after_mlp_norm(self.mlp(self.mlp_norm(x), context.adapter)), kv


class Gemma2(Decoder):
    """Soft caps on scores and logits, windows in every other layer."""

    layer_class = SandwichBlock
    norm_class = OffsetRMSNorm

    @staticmethod
    def layer_parts(config: ModelConfig, kind: LayerKind) -> LayerParts:
        width = config.hidden_size
        return {
            "attention_norm": ("input_layernorm", norm_part(width)),
            "attention": ("self_attn", attention_part(config)),
            "after_attention_norm": ("post_attention_layernorm", norm_part(width)),
            "mlp_norm": ("pre_feedforward_layernorm", norm_part(width)),
            "mlp": ("mlp", mlp_part(config)),
            "after_mlp_norm": ("post_feedforward_layernorm", norm_part(width)),
        }


class Gemma3(Gemma2):
    """Norms of Q and K in the place of soft caps; five layers with a window and a RoPE of their own to one
    without.
    """

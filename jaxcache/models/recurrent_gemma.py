"""RecurrentGemma (https://arxiv.org/abs/2404.07839), a Griffin: two recurrent layers to one with a window."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxcache.kernels.dispatch import Implementation
from jaxcache.models.config import ModelConfig
from jaxcache.models.convert import LayerParts, attention_part, mlp_part, norm_part, recurrent_part
from jaxcache.models.decoder import Decoder
from jaxcache.models.grouping import LayerKind
from jaxcache.models.layers import Attention, GatedMLP, LayerContext, OffsetRMSNorm
from jaxcache.models.recurrent import HybridCache, RecurrentMixer


class GriffinBlock(nnx.Module):
    """One layer: a recurrent mixer or attention, then an MLP, each behind a norm and added to its input."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.mixer_norm = OffsetRMSNorm((config.hidden_size,), config.norm_eps, dtype=dtype)
        if kind.kind == "recurrent":
            self.recurrent = RecurrentMixer(config, dtype=dtype, rngs=rngs)
        else:
            self.attention = Attention(config, kind, dtype=dtype, rngs=rngs)
        self.mlp_norm = OffsetRMSNorm((config.hidden_size,), config.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "T D"], cache: HybridCache, context: LayerContext, *, implementation: Implementation
    ) -> tuple[Float[Array, "T D"], HybridCache]:
        normed = self.mixer_norm(x)
        if hasattr(self, "recurrent"):
            y, cache = self.recurrent(normed, cache, context)
        else:
            y, kv = self.attention(normed, cache.kv, context, implementation=implementation)
            cache = HybridCache(kv, cache.state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x), context.adapter), cache


class RecurrentGemma(Decoder):
    """Called with a `HybridCache`."""

    layer_class = GriffinBlock
    norm_class = OffsetRMSNorm
    final_norm = "model.final_norm"

    @staticmethod
    def layer_parts(config: ModelConfig, kind: LayerKind) -> LayerParts:
        if kind.kind == "recurrent":
            mixer = {"recurrent": ("temporal_block", recurrent_part(config))}
        else:
            mixer = {"attention": ("temporal_block", attention_part(config))}
        return {
            "mixer_norm": ("temporal_pre_norm", norm_part(config.hidden_size)),
            **mixer,
            "mlp_norm": ("channel_pre_norm", norm_part(config.hidden_size)),
            "mlp": ("mlp_block", mlp_part(config)),
        }

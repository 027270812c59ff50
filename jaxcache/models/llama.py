"""The Llama family (Llama 2 and 3, SmolLM2 and others of `model_type` llama), and the layer that most others
share.
"""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxcache.kernels.dispatch import Implementation
from jaxcache.kernels.layout import KVCache
from jaxcache.models.config import ModelConfig
from jaxcache.models.convert import LayerParts, Part, attention_part, mlp_part, norm_part
from jaxcache.models.decoder import Decoder
from jaxcache.models.decoder import param_specs as decoder_param_specs
from jaxcache.models.grouping import LayerKind
from jaxcache.models.layers import Attention, Experts, GatedMLP, LayerContext, RMSNorm


class Block(nnx.Module):
    """One decoder layer: attention, and an MLP or experts, each behind a norm and added to its input."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.attention_norm = RMSNorm((config.hidden_size,), config.norm_eps, dtype=dtype)
        self.attention = Attention(config, kind, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm((config.hidden_size,), config.norm_eps, dtype=dtype)
        if config.experts is None:
            self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)
        else:
            self.experts = Experts(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "T D"], kv: KVCache, context: LayerContext, *, implementation: Implementation
    ) -> tuple[Float[Array, "T D"], KVCache]:
        y, kv = self.attention(self.attention_norm(x), kv, context, implementation=implementation)
        x = x + y
        normed = self.mlp_norm(x)
        return x + (self.mlp(normed, context.adapter) if hasattr(self, "mlp") else self.experts(normed)), kv


def block_parts(config: ModelConfig, mlp: tuple[str, Part] | None = None) -> LayerParts:
    """What Hugging Face calls the weights of a `Block`; `mlp` says where experts are and what they are."""
    width = config.hidden_size
    parts = {
        "attention_norm": ("input_layernorm", norm_part(width)),
        "attention": ("self_attn", attention_part(config)),
        "mlp_norm": ("post_attention_layernorm", norm_part(width)),
    }
    return parts | ({"mlp": ("mlp", mlp_part(config))} if mlp is None else {"experts": mlp})


class Llama(Decoder):
    """Grouped-query attention with RoPE, SwiGLU, RMS norms before each."""

    layer_class = Block

    @staticmethod
    def layer_parts(config: ModelConfig, kind: LayerKind) -> LayerParts:
        return block_parts(config)


def param_specs(config: ModelConfig, axis: str = "tp") -> Any:
    """`decoder.param_specs` of a Llama."""
    return decoder_param_specs(Llama, config, axis)

"""gpt-oss (https://arxiv.org/abs/2508.10925): windows in every other layer, sinks, clamped SwiGLU experts."""

from jaxcache.models.config import ModelConfig
from jaxcache.models.convert import LayerParts, fused_experts_part
from jaxcache.models.grouping import LayerKind
from jaxcache.models.llama import Llama, block_parts


class GptOss(Llama):
    """Llama's layer with biases everywhere, one more logit per head in the softmax, and experts."""

    @staticmethod
    def layer_parts(config: ModelConfig, kind: LayerKind) -> LayerParts:
        return block_parts(config, ("mlp", fused_experts_part(config)))

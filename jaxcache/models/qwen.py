"""Qwen2 and 2.5 (biases on Q, K and V), Qwen3 (norms of Q and K instead), Qwen3-MoE."""

from jaxcache.models.config import ModelConfig
from jaxcache.models.convert import LayerParts, experts_part
from jaxcache.models.grouping import LayerKind
from jaxcache.models.llama import Llama, block_parts


class Qwen2(Llama):
    """Llama with biases on Q, K and V; with `use_sliding_window` the last layers have windows."""


class Qwen3(Llama):
    """Llama with norms of each head's Q and K."""


class Qwen3Moe(Llama):
    """Qwen3 with experts in the place of the MLP."""

    @staticmethod
    def layer_parts(config: ModelConfig, kind: LayerKind) -> LayerParts:
        return block_parts(config, ("mlp", experts_part(config, "gate_proj", "up_proj", "down_proj")))

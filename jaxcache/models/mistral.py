"""Mistral (Llama, all of whose layers may have windows) and Mixtral (the same with experts)."""

from jaxcache.models.config import ModelConfig
from jaxcache.models.convert import LayerParts, experts_part
from jaxcache.models.grouping import LayerKind
from jaxcache.models.llama import Llama, block_parts


class Mistral(Llama):
    """Llama with a sliding window in every layer, or in none."""


class Mixtral(Llama):
    """Mistral with experts in the place of the MLP (https://arxiv.org/abs/2401.04088)."""

    @staticmethod
    def layer_parts(config: ModelConfig, kind: LayerKind) -> LayerParts:
        return block_parts(config, ("block_sparse_moe", experts_part(config, "w1", "w3", "w2")))

"""Which class runs which kind of model."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jaxcache.models.config import ModelConfig
from jaxcache.models.decoder import Decoder
from jaxcache.models.gemma import Gemma2, Gemma3
from jaxcache.models.gpt_oss import GptOss
from jaxcache.models.hf_config import base_architecture
from jaxcache.models.llama import Llama
from jaxcache.models.mistral import Mistral, Mixtral
from jaxcache.models.qwen import Qwen2, Qwen3, Qwen3Moe
from jaxcache.models.recurrent_gemma import RecurrentGemma

FAMILIES: dict[str, type[Decoder]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "gpt_oss": GptOss,
    "recurrent_gemma": RecurrentGemma,
}
"""Hugging Face's `model_type` -> the class, which is made by `from_tensors(config, tensors, dtype)`."""


def family_of(config: Mapping[str, Any]) -> type[Decoder]:
    """The class for the contents of a `config.json`; a `ValueError` names what is supported."""
    model_type = config.get("model_type")
    architecture = next(iter(config.get("architectures") or ()), "ForCausalLM")
    known = architecture.endswith("ForCausalLM") or architecture == base_architecture(model_type)
    if model_type not in FAMILIES or not known:
        raise ValueError(
            f"architecture {architecture} (model_type {model_type!r}) is not supported; supported are causal "
            f"language models, and their base models, of model_type {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def abstract_model(
    config: ModelConfig, source_config: Mapping[str, Any], dtype: jax.typing.DTypeLike
) -> nnx.Module:
    """The model with shapes and dtypes in the place of arrays."""
    family = family_of(source_config)
    return nnx.eval_shape(lambda: family(config, rngs=nnx.Rngs(0), dtype=dtype))

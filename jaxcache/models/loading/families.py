"""Which class runs which kind of model."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jaxcache.models.config import ModelConfig
from jaxcache.models.llama import Llama

FAMILIES: dict[str, type[Llama]] = {
    "llama": Llama,
}
"""Hugging Face's `model_type` -> the class, which is made by `from_tensors(config, tensors, dtype)`."""


def family_of(config: Mapping[str, Any]) -> type[Llama]:
    """The class for the contents of a `config.json`; a `ValueError` names what is supported."""
    model_type = config.get("model_type")
    architecture = next(iter(config.get("architectures") or ()), "ForCausalLM")
    if model_type not in FAMILIES or not architecture.endswith("ForCausalLM"):
        raise ValueError(
            f"architecture {architecture} (model_type {model_type!r}) is not supported; supported are causal "
            f"language models of model_type {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def abstract_model(
    config: ModelConfig, source_config: Mapping[str, Any], dtype: jax.typing.DTypeLike
) -> nnx.Module:
    """The model with shapes and dtypes in the place of arrays."""
    family = family_of(source_config)
    return nnx.eval_shape(lambda: family(config, rngs=nnx.Rngs(0), dtype=dtype))

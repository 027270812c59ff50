"""What a model file says, in one form whatever the file: Hugging Face names, shapes and config keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from jaxcache.models.config import ModelConfig
from jaxcache.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model as read from disk. Nothing of the weights is read before `tensors[name]` asks for it."""

    name: str
    config: dict[str, Any]
    """The keys of a Hugging Face `config.json`."""
    tensors: Mapping[str, np.ndarray]
    """By Hugging Face name; matrices are [out, in]. float32, float16 or bfloat16."""
    tokenizer: Tokenizer
    chat_template: str | None
    """Jinja source."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and all that belongs to it."""

    model: nnx.Module
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: str | None
    """Jinja source."""
    eos_token_ids: tuple[int, ...]
    name: str
    source_config: Mapping[str, Any]
    """The keys of `config.json` that `config` was made from."""

"""What a model file says, in one form whatever the file: Hugging Face names, shapes and config keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

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

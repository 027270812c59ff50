"""Random adapters for a family's small model, and the same model with an adapter merged into its weights."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import numpy as np

from jaxcache.models.config import ModelConfig
from jaxcache.models.decoder import Decoder
from jaxcache.models.loading.families import FAMILIES
from jaxcache.models.lora import LoRAAdapter

DATA = Path(__file__).parent.parent / "data"

PROJECTION = re.compile(r"(model\.layers\.\d+\..*\.(?:[qkvo]|gate|up|down)_proj)\.weight")


@functools.cache
def weights_of(name: str) -> tuple[type[Decoder], ModelConfig, dict[str, np.ndarray]]:
    """Of the small golden model of a family: its class, its config, its weights by Hugging Face name."""
    path = DATA / "llama_plain.npz" if name == "llama" else DATA / "families" / f"{name}.npz"
    with np.load(path) as file:
        arrays = dict(file)
    hf_config = json.loads(str(arrays.pop("config")))
    for key in ("tokens", "rows", "logits"):
        arrays.pop(key, None)
    config = dataclasses.replace(ModelConfig.from_hf(hf_config), max_position=128)
    return FAMILIES[hf_config["model_type"]], config, arrays


def random_adapter(arrays: dict[str, np.ndarray], seed: int, rank: int = 3, scale: float = 0.5) -> LoRAAdapter:
    """For every projection of `arrays` (weights by Hugging Face name); strong enough to change what is likely."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, weight in arrays.items():
        if (match := PROJECTION.fullmatch(name)) and ".experts." not in name:
            out, inside = weight.shape
            a = rng.normal(size=(rank, inside)).astype(np.float32) * inside**-0.5
            weights[match[1]] = (a, rng.normal(size=(out, rank)).astype(np.float32))
    return LoRAAdapter(weights, scale)


def merged(arrays: dict[str, np.ndarray], adapter: LoRAAdapter) -> dict[str, np.ndarray]:
    """`W + scale B A` in float64, rounded once."""
    result = dict(arrays)
    for name, (a, b) in adapter.weights.items():
        change = adapter.scale * b.astype(np.float64) @ a.astype(np.float64)
        result[f"{name}.weight"] = (arrays[f"{name}.weight"] + change).astype(np.float32)
    return result

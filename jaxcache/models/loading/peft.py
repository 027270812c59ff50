"""Reading adapters as Hugging Face's PEFT saves them: adapter_config.json and adapter_model.safetensors."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxcache.models.loading.huggingface import FLOAT_DTYPES, read_json
from jaxcache.models.lora import LoRAAdapter

WEIGHTS = "adapter_model.safetensors"
TENSOR = re.compile(r"(?:base_model\.model\.)?(model\.layers\.\d+\..+)\.lora_([AB])(?:\.default)?\.weight")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "layer_replication": ([], None),
}
"""Settings that change what an adapter computes, and their values that do not."""


def read_peft(folder: str | Path) -> LoRAAdapter:
    """The LoRA adapter in a PEFT folder; a `ValueError` says which file is missing, or what is not supported."""
    folder = Path(folder)
    config = read_json(folder / "adapter_config.json")
    if (kind := str(config.get("peft_type", "")).upper()) != "LORA":
        raise ValueError(f"{folder} holds an adapter of peft_type {kind or None!r}: only LORA is supported")
    for name, allowed in NEUTRAL.items():
        if name in config and config[name] not in allowed:
            raise ValueError(f"{folder}: an adapter with {name} = {config[name]!r} is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank <= 0:
        raise ValueError(f"{folder}: the adapter's r must be a positive integer, got {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ValueError(f"{folder}: the adapter's lora_alpha must be a number, got {alpha!r}")
    return LoRAAdapter(
        _pairs(folder, _tensors(folder / WEIGHTS)), alpha / (rank**0.5 if config.get("use_rslora") else rank)
    )


def _tensors(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: save the adapter with safe_serialization=True")
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                if (dtype := file.get_slice(name).get_dtype()) not in FLOAT_DTYPES:
                    raise ValueError(f"{path}: tensor {name} is {dtype}; supported are {', '.join(FLOAT_DTYPES)}")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def _pairs(folder: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B by the projection that they change."""
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if (match := TENSOR.fullmatch(name)) is None:
            raise ValueError(f"{folder}: tensor {name} is no LoRA weight of a decoder's projection")
        halves.setdefault(match[1], {})[match[2]] = tensor
    for name, half in halves.items():
        if len(half) < 2:
            raise ValueError(f"{folder}: {name} has lora_{next(iter(half))} but not the other half")
    return {name: (half["A"], half["B"]) for name, half in halves.items()}

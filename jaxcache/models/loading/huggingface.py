"""Reading Hugging Face model folders: config.json, safetensors, tokenizer.json, chat template."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxcache.models.hf_config import base_architecture
from jaxcache.models.loading.checkpoint import Checkpoint
from jaxcache.models.tokenizer import Tokenizer

FLOAT_DTYPES = ("F32", "F16", "BF16")


def read_huggingface(folder: str | Path) -> Checkpoint:
    """The model in a folder as Hugging Face lays it out, its weights read lazily from one or several safetensors
    files. A `ValueError` says which file is missing, cut off or of a kind that is not supported.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown")
        raise ValueError(f"{folder} holds {method}-quantised weights: take float weights, or a GGUF file")
    tensors = SafetensorsFolder(folder)
    if tensors.of_base_model:
        config["architectures"] = [base_architecture(config.get("model_type"))]
    return Checkpoint(
        name=folder.resolve().name,
        config=config,
        tensors=tensors,
        tokenizer=read_tokenizer(folder, config),
        chat_template=read_chat_template(folder),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a `ValueError` where the file is missing or holds something else."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: it is no complete Hugging Face model folder")
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


class SafetensorsFolder(Mapping[str, np.ndarray]):
    """All tensors of a folder's safetensors files by name. Headers are read at once, weights when asked for.

    Those of a base model (`of_base_model`) are stored without the `model.` that they have here.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for file in _safetensors_files(folder):
            try:
                self._files[file] = safe_open(folder / file, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{folder / file} is cut off, missing or no safetensors file: {error}") from error
            self._file_of.update(dict.fromkeys(self._files[file].keys(), file))
        self.of_base_model = "embed_tokens.weight" in self._file_of
        if self.of_base_model:
            self._file_of = {f"model.{name}": file for name, file in self._file_of.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._files[self._file_of[name]]
        stored = name.removeprefix("model.") if self.of_base_model else name
        dtype = file.get_slice(stored).get_dtype()
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"tensor {stored} is {dtype}; supported are {', '.join(FLOAT_DTYPES)}")
        return file.get_tensor(stored)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _safetensors_files(folder: Path) -> Sequence[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted(set(read_json(index).get("weight_map", {}).values()))
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    # Mistral's own release of the same weights, consolidated.safetensors, may lie beside them.
    files = [name for name in files if name.startswith("model")] or files
    if not files:
        pickled = any(folder.glob("*.bin"))
        hint = "its *.bin files are pickles, which are not read: convert them" if pickled else "fetch its weights"
        raise ValueError(f"{folder} has no *.safetensors file: {hint}")
    return files


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer.json of a folder, and what the files beside it say about where a text begins and ends."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json: save the model's fast tokenizer there")
    settings = _read_optional(folder / "tokenizer_config.json")
    generation = _read_optional(folder / "generation_config.json")
    try:
        tokenizer = Tokenizer.from_json(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    bos = _token_ids(tokenizer, settings.get("bos_token"))
    own = _token_ids(tokenizer, settings.get("eos_token"))
    ends = _as_list(generation.get("eos_token_id")) or _as_list(config.get("eos_token_id"))
    # A bos_token that is null says that there is none, whatever the config says.
    starts = [] if settings.get("bos_token", "") is None else _as_list(config.get("bos_token_id"))
    tokenizer.bos_token_id = next(iter((*bos, *starts)), None)
    tokenizer.eos_token_ids = tuple(dict.fromkeys((*own, *ends)))
    return tokenizer


def _token_ids(tokenizer: Tokenizer, token: Any) -> list[int]:
    """Of a special token as tokenizer_config.json writes it: its text, or an object with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return [] if token_id is None else [token_id]


def _as_list(ids: Any) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def read_chat_template(folder: Path) -> str | None:
    """chat_template.jinja, or the template in tokenizer_config.json (of several, the one named default)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = _read_optional(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template

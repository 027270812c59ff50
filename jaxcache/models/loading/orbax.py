"""Checkpoints of our own: a folder as Hugging Face lays it out, with Orbax arrays in the place of safetensors.

    jaxcache.json             format, dtype, and size and fingerprint of every other file
    config.json tokenizer.json tokenizer_config.json generation_config.json chat_template.jinja
    params/                   the model's NNX state, by path

A folder is written beside its place and renamed into it, so that it is there whole or not at all; what happens to
it later is found out from the fingerprints.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import xxhash
from flax import nnx

from jaxcache.models.config import ModelConfig
from jaxcache.models.loading.checkpoint import LoadedModel
from jaxcache.models.loading.families import abstract_model
from jaxcache.models.loading.find import MANIFEST, is_checkpoint
from jaxcache.models.loading.huggingface import read_chat_template, read_json, read_tokenizer

FORMAT = 2
"""Raised when an older folder can no longer be read, or keeps what is now read from model files differently."""

PARAMS = "params"


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used, whatever it is wanted for."""


def save_checkpoint(path: str | Path, loaded: LoadedModel, *, overwrite: bool = False) -> None:
    """Write a model, its config, tokenizer and chat template as a folder that `restore_checkpoint` reads.

    A `ValueError` where `path` exists and `overwrite` is not set. Until the last moment nothing is at `path`.
    """
    path = Path(path).absolute()
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: choose another path, or overwrite=True")
    work = _beside(path)
    work.mkdir(parents=True)
    try:
        _write_text_files(work, loaded)
        arrays = dict(zip(*_named(nnx.state(loaded.model)), strict=True))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
            checkpointer.save(work / PARAMS, args=ocp.args.PyTreeSave(arrays))
        _write_manifest(work, loaded, arrays)
        _move_into_place(work, path)
    finally:
        _remove(work)


def restore_checkpoint(
    path: str | Path, *, dtype: jax.typing.DTypeLike | None = None, sharding: Any = None
) -> LoadedModel:
    """The model in a folder that `save_checkpoint` wrote.

    `dtype`: of the weights; None keeps the stored one. `sharding`: one `jax.sharding.Sharding` for all arrays, or
    a pytree of them shaped like `nnx.state(model)`; each process and device then reads its own part. None puts
    everything on the default device.

    A `CheckpointError` (a `ValueError`) where the folder is of another kind, incomplete or damaged.
    """
    path = Path(path).absolute()
    manifest = _verified_manifest(path)
    source_config = read_json(path / "config.json")
    config = ModelConfig.from_hf(source_config)
    model = abstract_model(config, source_config, jnp.dtype(dtype or manifest["dtype"]))
    graph, state = nnx.split(model)
    names, leaves = _named(state)
    shapes = {name: list(leaf.shape) for name, leaf in zip(names, leaves)}
    if shapes != manifest["params"]:
        differing = sorted(set(map(str, shapes.items())) ^ set(map(str, manifest["params"].items())))
        raise CheckpointError(f"{path} was written for another layout of this model: {'; '.join(differing[:4])}")
    targets = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        for leaf, place in zip(leaves, shardings_of(state, sharding))
    ]
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(path / PARAMS, dict(zip(names, targets)))
    state = jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in names])
    tokenizer = read_tokenizer(path, source_config)
    return LoadedModel(
        model=nnx.merge(graph, state),
        config=config,
        tokenizer=tokenizer,
        chat_template=read_chat_template(path),
        eos_token_ids=tokenizer.eos_token_ids,
        name=manifest["name"],
        source_config=source_config,
    )


def shardings_of(state: Any, sharding: Any) -> Sequence[jax.sharding.Sharding]:
    """One sharding per array of an `nnx.State`; `sharding` as `restore_checkpoint` takes it."""
    names, leaves = _named(state)
    if sharding is None:
        sharding = jnp.zeros(()).sharding
    if isinstance(sharding, jax.sharding.Sharding):
        return [sharding] * len(leaves)
    given, places = _named(sharding)
    if given != names:
        differing = sorted(set(given) ^ set(names))
        raise ValueError(
            f"the sharding is for other arrays than the model's (differing: {', '.join(differing[:4])}): "
            "give one Sharding, or a pytree made from nnx.state(model)"
        )
    return places


def _named(tree: Any) -> tuple[list[str], list[Any]]:
    """Dotted path and leaf of each array."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in flat]
    return names, [leaf for _, leaf in flat]


def _write_text_files(folder: Path, loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    files: dict[str, Any] = {
        "config.json": dict(loaded.source_config),
        "generation_config.json": {"eos_token_id": list(loaded.eos_token_ids)},
        "tokenizer_config.json": {
            "bos_token": tokenizer.bos_token or None,
            "eos_token": tokenizer.eos_token or None,
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1), "utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    if loaded.chat_template is not None:
        (folder / "chat_template.jinja").write_bytes(loaded.chat_template.encode())


def _write_manifest(folder: Path, loaded: LoadedModel, arrays: dict[str, jax.Array]) -> None:
    sizes = {name: array.nbytes for name, array in arrays.items()}
    manifest = {
        "format": FORMAT,
        "name": loaded.name,
        "dtype": str(arrays[max(sizes, key=lambda name: sizes[name])].dtype),
        "params": {name: list(array.shape) for name, array in arrays.items()},
        "files": _fingerprints(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")


def _verified_manifest(path: Path) -> dict[str, Any]:
    if not is_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint of jaxcache's: it has no {MANIFEST}")
    try:
        manifest = read_json(path / MANIFEST)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r}, but this version reads {FORMAT}: save it again"
        )
    if not {"name", "dtype", "params", "files"} <= manifest.keys():
        raise CheckpointError(f"{path / MANIFEST} is incomplete. Save the checkpoint again")
    found = _fingerprints(path)
    wrong = [name for name, expected in manifest["files"].items() if found.get(name) != expected]
    if wrong:
        raise CheckpointError(
            f"{path} is damaged: {', '.join(wrong[:4])} missing or not as written. Save it again"
        )
    return manifest


def _fingerprints(folder: Path) -> dict[str, str]:
    """Of every file but the manifest. They tell a damaged file, not a forged one."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): _fingerprint(path) for path in files}


def _fingerprint(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _move_into_place(work: Path, path: Path) -> None:
    """Rename `work` to `path`; what was there before is moved aside first and then removed."""
    aside = _beside(path)
    if path.exists():
        os.replace(path, aside)
    os.replace(work, path)
    shutil.rmtree(aside, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Of a save that failed, writers may go on for a moment in threads of their own: what is removed before they
    have ended can come back.
    """
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _beside(path: Path) -> Path:
    """A name in the same folder that nobody else uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")

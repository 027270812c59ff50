"""From the name of a model to the model."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jaxcache.models.config import ModelConfig
from jaxcache.models.loading.cache import cache_path
from jaxcache.models.loading.checkpoint import Checkpoint, LoadedModel
from jaxcache.models.loading.families import family_of
from jaxcache.models.loading.find import find_model
from jaxcache.models.loading.gguf import read_gguf
from jaxcache.models.loading.huggingface import read_huggingface
from jaxcache.models.loading.orbax import (
    CheckpointError,
    restore_checkpoint,
    save_checkpoint,
    shardings_of,
)

logger = logging.getLogger("jaxcache")

DTYPES = ("float32", "bfloat16", "float16")


def load_model(
    path_or_package: str | Path,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Any = None,
    cache: bool = True,
) -> LoadedModel:
    """A model with its tokenizer and chat template, from whatever `find_model` finds.

    `dtype`: of the weights; None is float32 on CPUs (where bfloat16 is slower) and bfloat16 elsewhere.
    `sharding`: one `jax.sharding.Sharding`, or a pytree of them shaped like `nnx.state(model)`.
    `cache`: keep the expanded weights of a GGUF file in the user's cache directory (see `cache_home`), and take
    them from there the next time. A damaged copy is noticed and made anew.
    """
    source = find_model(path_or_package)
    weights = _weight_dtype(dtype)
    if source.kind == "orbax":
        return restore_checkpoint(source.path, dtype=weights, sharding=sharding)
    if source.kind == "huggingface":
        return _convert(read_huggingface(source.path), weights, sharding)

    def convert() -> LoadedModel:
        return _convert(read_gguf(source.path), weights, sharding)

    if not cache:
        return convert()
    loaded = _from_cache(cache_path(source.path, weights), convert, weights, sharding)
    return dataclasses.replace(loaded, name=source.path.stem)


def _weight_dtype(dtype: jax.typing.DTypeLike | None) -> np.dtype:
    if dtype is None:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        result = None
    if result is None or result.name not in DTYPES:
        raise ValueError(f"weights cannot be {dtype!r}: choose one of {', '.join(DTYPES)}")
    return result


def _from_cache(path: Path, convert: Callable[[], LoadedModel], dtype: np.dtype, sharding: Any) -> LoadedModel:
    """The model kept at `path`, or a new one, which is then kept there."""
    if path.exists():
        try:
            return restore_checkpoint(path, dtype=dtype, sharding=sharding)
        except CheckpointError as error:
            logger.warning("the converted weights in the cache cannot be used and are made anew: %s", error)
    loaded = convert()
    try:
        save_checkpoint(path, loaded, overwrite=True)
    except (OSError, ValueError) as error:  # a disk that is full: ValueError where it is arrays that do not fit
        logger.warning(
            "the converted weights cannot be kept at %s for the next run; the model is used all the same: %s",
            path,
            error,
        )
    return loaded


def _convert(checkpoint: Checkpoint, dtype: np.dtype, sharding: Any) -> LoadedModel:
    family = family_of(checkpoint.config)
    config = ModelConfig.from_hf(checkpoint.config)
    with _Progress(checkpoint.tensors, f"Loading {checkpoint.name}") as tensors:
        model = family.from_tensors(config, tensors, dtype)
    if sharding is not None:
        graph, state = nnx.split(model)
        places = jax.tree.unflatten(jax.tree.structure(state), shardings_of(state, sharding))
        model = nnx.merge(graph, jax.device_put(state, places))
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        eos_token_ids=checkpoint.tokenizer.eos_token_ids,
        name=checkpoint.name,
        source_config=checkpoint.config,
    )


class _Progress(Mapping[str, np.ndarray]):
    """The tensors, with a bar on stderr (where that is a terminal) that moves as they are read."""

    def __init__(self, tensors: Mapping[str, np.ndarray], text: str) -> None:
        self._tensors = tensors
        self._bar = tqdm(total=len(tensors), desc=text, unit="tensor", disable=None, delay=1.0, leave=False)

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[name]
        self._bar.update()
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

"""Prompts of more than text: rows of embeddings on some of the tokens, or in the place of all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcache.core.hashing import MultiModalFeature, content_identifier

PlacedRows = tuple[int, np.ndarray]
"""Position of the first, and float32 [n, width] in the place of the embeddings of the tokens from there on."""


@dataclass(frozen=True, eq=False)
class Feature:
    """An image, a sound, ... as the encoder gave it, on the prompt's tokens from `offset` on.

    The tokens under it (placeholders, as a rule) are part of what identifies a prompt, and so is `identifier`, for
    which everybody who gives it vouches: equal ones must mean equal `embeds`.
    """

    offset: int
    embeds: np.ndarray
    """[length, width], one row per token."""
    identifier: str | None = None
    """By default made from `embeds` and `kind` (`content_identifier`)."""
    kind: str = ""
    """How the content was made and is to be read: encoder, mode, size, ... whatever else tells contents apart."""

    def __post_init__(self) -> None:
        if not isinstance(self.offset, int | np.integer) or isinstance(self.offset, bool):
            raise ValueError(f"a feature's offset must be an integer, got {self.offset!r}")
        object.__setattr__(self, "embeds", checked_rows(self.embeds, "a feature's embeds"))
        if self.identifier is None:
            object.__setattr__(self, "identifier", content_identifier(self.embeds, self.kind))

    @property
    def place(self) -> MultiModalFeature:
        return MultiModalFeature(self.identifier or "", int(self.offset), len(self.embeds))


@dataclass(frozen=True, eq=False)
class PromptInputs:
    """Token ids with features on them, or embeddings instead of token ids (one row per token of the prompt)."""

    token_ids: Iterable[int] | None = None
    features: Sequence[Feature] = ()
    embeds: np.ndarray | None = None
    """[tokens, width]"""

    def __post_init__(self) -> None:
        if (self.token_ids is None) == (self.embeds is None):
            raise ValueError("PromptInputs take token_ids or embeds, one of the two")
        if self.token_ids is not None and not hasattr(self.token_ids, "__len__"):
            object.__setattr__(self, "token_ids", list(self.token_ids))
        if self.embeds is not None:
            object.__setattr__(self, "embeds", checked_rows(self.embeds, "PromptInputs.embeds"))
        if wrong := [one for one in self.features if not isinstance(one, Feature)]:
            raise ValueError(f"PromptInputs.features must be Feature objects, got {type(wrong[0]).__name__}")
        seen: dict[Any, Feature] = {}
        for one in self.features:
            if not np.array_equal(one.embeds, seen.setdefault(one.identifier, one).embeds):
                raise ValueError(f"two features go by the identifier {one.identifier!r}, but their embeds differ")

    @property
    def rows(self) -> tuple[PlacedRows, ...]:
        """What stands in the place of tokens' embeddings, in order; apart where `features` are."""
        whole = () if self.embeds is None else ((0, self.embeds),)
        return (*whole, *((int(feature.offset), feature.embeds) for feature in self.features))


Prompt = str | Sequence[int] | PromptInputs
"""A text, token ids, or more."""


def checked_rows(rows: Any, what: str) -> np.ndarray:
    """`rows` as a contiguous float32 copy that nobody else writes to; a `ValueError` unless they can be rows."""
    array = np.asarray(rows)
    if array.ndim != 2 or not array.size or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{what} must be [tokens, width] of floating point, got {list(array.shape)} of {array.dtype}"
        )
    copied = np.array(array, np.float32, order="C")
    if not np.isfinite(copied).all():
        raise ValueError(f"{what} must be finite, but some values are not")
    copied.flags.writeable = False
    return copied


def rows_between(placed: Sequence[PlacedRows], start: int, stop: int) -> tuple[PlacedRows, ...]:
    """What of `placed` falls on positions `[start, stop)`, by position from `start` on."""
    found = []
    for at, rows in placed:
        first, last = max(at, start), min(at + len(rows), stop)
        if first < last:
            found.append((first - start, rows[first - at : last - at]))
    return tuple(found)


def batch_of(prompts: Any) -> list[Any]:
    """Prompts as a list. A single one is a text, inputs, or token ids in any container."""
    if isinstance(prompts, str | PromptInputs) or hasattr(prompts, "dtype"):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and not hasattr(prompts[0], "__len__"):
        return list(prompts) if isinstance(prompts[0], PromptInputs) else [prompts]
    return list(prompts)

"""What each layer keeps of the past, and which layers share a block table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Int

KINDS = ("full", "sliding_window", "chunked_local", "recurrent")
SIZED = ("sliding_window", "chunked_local")


@dataclass(frozen=True)
class LayerKind:
    """`full`: KV of every token. `sliding_window`: of the last `size` tokens. `chunked_local`: of the chunk of
    `size` tokens that the current one is in. `recurrent`: a state of fixed size instead of KV.
    """

    kind: str = "full"
    size: int | None = None
    """In tokens; None for the kinds that have none."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"layer kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.kind in SIZED:
            if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size <= 0:
                raise ValueError(f"a {self.kind} layer needs a positive number of tokens, got {self.size!r}")
        elif self.size is not None:
            raise ValueError(f"a {self.kind} layer has no size, got {self.size!r}")

    @property
    def sliding_window(self) -> int | None:
        return self.size if self.kind == "sliding_window" else None


FULL = LayerKind()
RECURRENT = LayerKind("recurrent")


def group_layers(layer_kinds: Sequence[LayerKind]) -> tuple[tuple[int, ...], ...]:
    """The layers of each KV-cache group, by number, rising.

    One group if all layers are alike. Else groups of one kind and of at most `size` layers, `size` being the
    smallest number of layers of any kind, or the largest where that is less than half as much again. The layers of
    a kind are dealt out over its groups in turn. Groups of full attention come first, the others in the order in
    which their kinds first appear. Since no group has more than `size` layers and a block belongs to one group at
    a time, one KV array of `size` layers serves all groups.
    """
    members: dict[LayerKind, list[int]] = {}
    for layer, kind in enumerate(layer_kinds):
        members.setdefault(kind, []).append(layer)
    if len(members) <= 1:
        return tuple(tuple(layers) for layers in members.values())
    counts = [len(layers) for layers in members.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups: list[tuple[int, ...]] = []
    for kind in sorted(members, key=lambda kind: kind.kind != "full"):
        layers = members[kind]
        num_groups = math.ceil(len(layers) / size)
        groups += [tuple(layers[nth::num_groups]) for nth in range(num_groups)]
    return tuple(groups)


class LayerPlace(NamedTuple):
    """Where a layer finds its KV: the group whose block table it reads, and its layer of the KV array."""

    group: int | Int[Array, ""]
    layer: int | Int[Array, ""]


def layer_places(groups: Sequence[Sequence[int]]) -> tuple[LayerPlace, ...]:
    """The place of every layer, by layer number."""
    places = {
        layer: LayerPlace(group, nth) for group, layers in enumerate(groups) for nth, layer in enumerate(layers)
    }
    return tuple(places[layer] for layer in range(len(places)))


def period(layer_kinds: Sequence[LayerKind]) -> int:
    """The length of the shortest pattern that the layers repeat at least twice, the last time perhaps not to its
    end; 0 where there is none.
    """
    for length in range(1, len(layer_kinds) // 2 + 1):
        if all(kind == layer_kinds[nth % length] for nth, kind in enumerate(layer_kinds)):
            return length
    return 0

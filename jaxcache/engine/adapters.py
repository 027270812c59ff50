"""Which adapters are loaded, in which slot, and under which version."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

from jaxcache.engine.runner import ModelRunner
from jaxcache.models.lora import LoRAAdapter


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One version of an adapter. Whoever loads weights under a name makes another version."""

    name: str
    version: int
    """Never given twice in an engine: what keeps one version's blocks from the next (`Request.adapter_id`)."""
    slot: int
    rank: int


class AdapterTable:
    """Names and slots of one engine's adapters.

    A name leads to the version that new requests get. A version's slot is free again once no name leads to it and
    no unfinished request was given it: requests keep the weights that they began with.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._versions = count(1)
        self._by_name: dict[str, LoadedAdapter] = {}

    def __getitem__(self, name: str) -> LoadedAdapter:
        """A `ValueError` where nothing goes by that name."""
        if name not in self._by_name:
            raise ValueError(f"adapter {name!r} is not loaded: {self._loaded()}")
        return self._by_name[name]

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """In the order in which their names came."""
        return tuple(self._by_name.values())

    def load(
        self, name: str, adapter: LoRAAdapter, *, replace: bool, in_use: Collection[LoadedAdapter]
    ) -> LoadedAdapter:
        """Put `adapter` into a free slot; a `ValueError`, nothing changed, if none is free or it does not fit.

        `in_use`: the versions that unfinished requests have.
        """
        if self._runner.lora is None:
            raise ValueError("this engine has no room for adapters: make it with lora=LoRAConfig(...)")
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name must be a string and not empty, got {name!r}")
        if name in self._by_name and not replace:
            raise ValueError(f"an adapter {name!r} is loaded: unload it, give another name, or replace=True")
        kept = {loaded.slot: loaded for loaded in (*self._by_name.values(), *in_use)}
        old = self._by_name.get(name)
        if old is not None and old not in in_use:
            del kept[old.slot]
        free = [slot for slot in range(1, self._runner.lora.max_loras + 1) if slot not in kept]
        if not free:
            busy = sorted({f"{one.name!r} (version {one.version})" for one in in_use})
            raise ValueError(
                f"all {self._runner.lora.max_loras} slots for adapters are taken: {self._loaded()}"
                + (f"; unfinished requests use {', '.join(busy)}" if busy else "")
                + ". Unload one, wait, or raise LoRAConfig.max_loras"
            )
        self._runner.set_adapter(free[0], adapter)
        loaded = LoadedAdapter(name, next(self._versions), free[0], adapter.rank)
        self._by_name[name] = loaded
        return loaded

    def unload(self, name: str) -> None:
        """Nothing goes by that name any more."""
        del self._by_name[self[name].name]

    def _loaded(self) -> str:
        return f"loaded are {', '.join(map(repr, self._by_name)) or 'none'}"

"""Tile sizes and the like per device kind: one JSON file each, with a default that fits every TPU and GPU.

The device kind is what JAX calls it (`jax.Device.device_kind`), handed in by the caller: a program may be
compiled on a machine that has another device, or none.
"""

import json
import re
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

DEFAULT = "default"


@dataclass(frozen=True)
class TpuTuning:
    """How to cut the work of the TPU kernels. Sizes are chosen from static bundle counts, see
    `docs/kernels.md`."""

    chunk: int
    """KV tokens fetched and attended to at a time."""
    prefill_sizes: tuple[int, ...]
    """What a chunk that is not full is rounded up to in prefill; the last one is `chunk`."""
    decode_sizes: tuple[int, ...]
    prefill_rows: int
    """Rows of a prefill tile, query heads of one KV head times tokens: enough that compute outweighs fetching
    KV."""
    row_sum: str
    """"lanes", or "matmul" where the matrix unit is 256 wide."""
    depth: int
    """KV heads in flight between softmax and weighted values."""
    stacked_heads: int
    """KV heads that share one softmax in decode."""
    decode_tiles: int
    """Sequences per program of the decode instance."""


@dataclass(frozen=True)
class GpuTuning:
    """How to cut the work of the GPU kernels. Rows and chunks are powers of two, at least 16, for heads of up to
    128 in 16 bits; wider ones and f32 take a share of them."""

    prefill_rows: int
    """Rows of a prefill tile, query heads of one KV head times tokens."""
    prefill_chunk: int
    """KV tokens attended to at a time."""
    prefill_warps: int
    prefill_stages: int
    """Chunks in flight."""
    decode_chunk: int
    decode_warps: int
    decode_stages: int
    decode_programs: int
    """Programs that fill the device: sequences are split over their KV until there are so many."""
    split_tokens: int
    """KV tokens that make a split worth its share of the merge."""


def known_kinds() -> list[str]:
    """The device kinds that have a file of their own."""
    return sorted(_entries())


def tpu_tuning(device_kind: str | None) -> TpuTuning:
    """The entry of `device_kind`; the default for `None` and for a kind without one."""
    return _tuning("tpu", TpuTuning, device_kind)


def gpu_tuning(device_kind: str | None) -> GpuTuning:
    """As `tpu_tuning`."""
    return _tuning("gpu", GpuTuning, device_kind)


@cache
def _tuning(section: str, kind: Any, device_kind: str | None) -> Any:
    default = _read(f"{DEFAULT}.json")[section]
    chosen = _entries().get(device_kind or "", {}).get(section, {})
    unknown = set(chosen) - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"the tuning of {device_kind!r} has unknown entries {sorted(unknown)}")
    values = default | chosen
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@cache
def _entries() -> dict[str, dict]:
    names = (file.name for file in resources.files(__name__).iterdir())
    files = [_read(name) for name in names if name.endswith(".json") and name != f"{DEFAULT}.json"]
    return {kind: file for file in files for kind in file["device_kinds"]}


def _read(name: str) -> dict:
    return json.loads(resources.files(__name__).joinpath(name).read_text())


def save(device_kind: str, section: str, values: dict[str, Any], folder: Path | None = None) -> Path:
    """Write `values` as the `section` ("tpu" or "gpu") of `device_kind`, to a file of its own.

    In the package itself (`folder` None) the kind is taken out of the file that had it, and the next look-up finds
    the new values.
    """
    place = Path(str(resources.files(__name__))) if folder is None else folder
    for path in sorted(place.glob("*.json")):
        content = json.loads(path.read_text())
        if device_kind in content.get("device_kinds", ()):
            content["device_kinds"].remove(device_kind)
            if content["device_kinds"]:
                path.write_text(json.dumps(content, indent=2) + "\n")
            else:
                path.unlink()
    path = place / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json")
    path.write_text(json.dumps({"device_kinds": [device_kind], section: values}, indent=2) + "\n")
    _entries.cache_clear()
    _tuning.cache_clear()
    return path

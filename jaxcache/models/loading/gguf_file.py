"""The format of GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The header is parsed here rather than by `gguf.GGUFReader`, which keeps a numpy view of every string (3 s for a
vocabulary of 49,152, here 0.1 s) and does not notice where a file is cut off. Blocks of quantised weights are
expanded by the `gguf` package.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""struct codes of the metadata types."""

PLAIN_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}


class TensorInfo(NamedTuple):
    """Where one tensor lies. `shape` is numpy's: GGUF lists dimensions the other way round."""

    shape: tuple[int, ...]
    type: int
    start: int
    num_bytes: int


class GGUFFile(NamedTuple):
    """Metadata and the tensors' places; `data` is the mapped file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap


def parse_gguf(path: Path) -> GGUFFile:
    """The header of a GGUF file, every length checked against the file's size."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the path of a .gguf file")
    with path.open("rb") as stream:
        start = stream.read(4)
        if start != MAGIC:
            raise ValueError(f"{path} is no GGUF file: it starts with {start!r} instead of {MAGIC!r}")
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Header(data).read()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = len(MAGIC)

    def read(self) -> GGUFFile:
        version = self.scalar("I")
        if version & 0xFFFF == 0:
            raise ValueError("this GGUF file is big-endian: convert it to little-endian")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported: versions 2 and 3 are")
        num_tensors, num_fields = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(num_fields):
            name = self.string()
            metadata[name] = self.value(self.scalar("I"))
        if metadata.get("split.count", 1) > 1:
            raise ValueError("this is one part of a split model: join the parts with llama-gguf-split --merge")
        infos = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment must be a positive integer, got {alignment!r}")
        base = -(-self.offset // alignment) * alignment
        return GGUFFile(metadata, dict(self.place(base, *info) for info in infos), self.data)

    def take(self, size: int) -> int:
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self.data):
            raise ValueError(
                f"the file is cut off or damaged: its header reaches to byte {self.offset} and beyond, "
                f"but the file ends at {len(self.data)}. Fetch it again"
            )
        return start

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack_from("<" + code, self.data, self.take(size))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.take(size)
        return str(self.data[start : start + size], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in SCALARS:
                start = self.take(count * struct.calcsize(SCALARS[item]))
                return list(struct.unpack_from(f"<{count}{SCALARS[item]}", self.data, start))
            return [self.value(item) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"the file is damaged: metadata of type {kind}")
        return self.scalar(SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))
        return name, shape[::-1], self.scalar("I"), self.scalar("Q")

    def place(
        self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> tuple[str, TensorInfo]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except ValueError:
            raise ValueError(f"tensor {name} has type {kind}, which the gguf package does not know") from None
        num_bytes = math.prod(shape) // block * block_bytes
        info = TensorInfo(shape, kind, base + offset, num_bytes)
        if info.start + num_bytes > len(self.data):
            raise ValueError(
                f"the file is cut off: tensor {name} reaches to byte {info.start + num_bytes}, but the file ends "
                f"at {len(self.data)}. Fetch it again"
            )
        return name, info


def expand(file: GGUFFile, name: str, nth: int | None = None) -> np.ndarray:
    """One tensor by its GGUF name, as floats: float32, or as stored where that is f16 or bf16.

    `nth`: only this part of it along the first axis.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    info = file.tensors[name]
    if nth is not None:
        size = info.num_bytes // info.shape[0]
        info = TensorInfo(info.shape[1:], info.type, info.start + nth * size, size)
    kind = GGMLQuantizationType(info.type)
    raw = np.frombuffer(file.data, np.uint8, info.num_bytes, info.start)
    if kind.name in PLAIN_DTYPES:
        array = raw.view(PLAIN_DTYPES[kind.name]).reshape(info.shape)
        return array.astype(np.float32) if kind.name == "F64" else array
    try:
        return dequantize(raw.reshape(*info.shape[:-1], -1), kind).reshape(info.shape)
    except NotImplementedError:
        raise ValueError(f"tensor {name} is {kind.name}, which the gguf package cannot expand to floats") from None

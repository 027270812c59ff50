"""Traces in the format of Mooncake: one request a line, its prompt as one id per block of 512 tokens."""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TRACE_BLOCK = 512
"""Tokens that one `hash_ids` entry stands for; equal ids mean equal tokens from the start up to there."""

TOKENS_PER_UNIT = 2
"""Tokens that stand for each unit in a replay: two, so that a unit that is not full can be told (it has one)."""


@dataclass(frozen=True)
class TraceRequest:
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    """Tokens, as is `input_length`."""
    hash_ids: tuple[int, ...]
    """Small numbers, from 0: a replay makes token ids of them."""


@dataclass(frozen=True)
class Trace:
    name: str
    requests: list[TraceRequest]

    @property
    def num_tokens(self) -> int:
        """Of all prompts together."""
        return sum(request.input_length for request in self.requests)


def read_trace(path: str | Path, limit: int | None = None) -> Trace:
    """The first `limit` requests of a file of JSON lines, gzipped or not. A `ValueError` names a bad line.

    Of the file's `hash_ids` only which are equal is kept: they are numbered in the order in which they come.
    """
    path = Path(path)
    requests, numbers = [], {}
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_request(line, f"{path.name}:{number}", numbers))
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is cut off or damaged: {error}. Fetch it again") from error
    if not requests:
        raise ValueError(f"{path} holds no requests")
    return Trace(path.name.split(".")[0], requests)


def _request(line: str, where: str, numbers: dict[Any, int]) -> TraceRequest:
    """`numbers`: that of each hash id so far; the line's are added."""
    try:
        row = json.loads(line)
        request = TraceRequest(
            float(row.get("timestamp", 0)),
            int(row["input_length"]),
            int(row.get("output_length", 0)),
            tuple(numbers.setdefault(hash_id, len(numbers)) for hash_id in row["hash_ids"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{where} is no request: expected an object with input_length and hash_ids, "
            f"got {line[:80]!r} ({error!r})"
        ) from error
    needed = -(-request.input_length // TRACE_BLOCK)
    if request.input_length < 1 or len(request.hash_ids) < needed:
        raise ValueError(
            f"{where}: {request.input_length} tokens need at least one token and {needed} hash_ids "
            f"of {TRACE_BLOCK}, got {len(request.hash_ids)}"
        )
    return request


def check_block_size(block_size: int) -> None:
    """A `ValueError` unless blocks of a trace can be told apart at this size."""
    if block_size < 1 or (TRACE_BLOCK % block_size and block_size % TRACE_BLOCK):
        raise ValueError(
            f"block_size {block_size} neither divides {TRACE_BLOCK} nor is a multiple of it: the trace says only "
            f"which blocks of {TRACE_BLOCK} tokens are equal"
        )


def unit_size(block_size: int) -> int:
    """Tokens of the smallest piece that a replay at `block_size` has to tell apart."""
    check_block_size(block_size)
    return min(block_size, TRACE_BLOCK)


def block_ids(request: TraceRequest, block_size: int) -> np.ndarray:
    """One id for each full unit of the prompt, int64: equal ids mean equal content up to there."""
    unit = unit_size(block_size)
    per_id = TRACE_BLOCK // unit
    nth = np.arange(request.input_length // unit)
    return np.asarray(request.hash_ids, np.int64)[nth // per_id] * per_id + nth % per_id


def stand_in_tokens(request: TraceRequest, block_size: int) -> tuple[np.ndarray, int]:
    """A short prompt that has the blocks of the real one, and its block size.

    Only equality of blocks matters to the cache, so each unit is `TOKENS_PER_UNIT` copies of its id, and what is
    left over at the end is one token: hits, blocks and evictions come out as with all tokens.
    """
    ids = block_ids(request, block_size).astype(np.int32)
    tokens = np.repeat(ids, TOKENS_PER_UNIT)
    if request.input_length % unit_size(block_size):
        tokens = np.append(tokens, np.int32(0))
    return tokens, TOKENS_PER_UNIT * max(1, block_size // TRACE_BLOCK)


def chains(trace: Trace, block_size: int) -> list[Sequence[int]]:
    """The full blocks of each prompt, by ids that are equal where the content is."""
    per_block = max(1, block_size // TRACE_BLOCK)
    return [block_ids(request, block_size)[per_block - 1 :: per_block].tolist() for request in trace.requests]

"""`/v1/embeddings` in OpenAI's shape: bodies to `PoolingParams`, vectors to the answer."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxcache.engine import PoolingParams, RequestOutput
from jaxcache.serve.protocol import (
    ApiError,
    cache_salt,
    check_fields,
    check_model,
    made,
    priority,
    prompts,
    usage,
)

_POOLING = frozenset(
    ["pooling", "normalize", "skip_reading_prefix_cache", "skip_writing_prefix_cache", "cache_retention"]
)
_KNOWN = _POOLING | {"model", "input", "encoding_format", "cache_salt", "priority"}


@dataclass(frozen=True)
class EmbeddingAsk:
    """A request for embeddings, checked."""

    prompts: list[Any]
    """Texts or token ids."""
    params: PoolingParams
    base64: bool
    """Vectors as the bytes of little-endian float32, in base64, instead of lists of numbers."""
    cache_salt: str | None
    priority: int
    adapter: str | None = None

    @property
    def num_answers(self) -> int:
        return len(self.prompts)


def parse_embeddings(body: Mapping[str, Any], model: str) -> EmbeddingAsk:
    """The body of `/v1/embeddings`. An `ApiError` (400, 404) for what cannot be done."""
    check_fields(body, _KNOWN)
    check_model(body, model)
    if "input" not in body:
        raise ApiError(400, "input is missing: give a text, token ids, or a list of either", param="input")
    encoding = body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise ApiError(
            400, f"encoding_format must be 'float' or 'base64', got {encoding!r}", param="encoding_format"
        )
    given = {name: body[name] for name in _POOLING & body.keys() if body[name] is not None}
    params = made(PoolingParams, given)
    asked = prompts(body["input"], "input")
    return EmbeddingAsk(asked, params, encoding == "base64", cache_salt(body), priority(body))


def embeddings(ask: EmbeddingAsk, outputs: Sequence[RequestOutput], model: str) -> dict[str, Any]:
    """The answer; `outputs` in the prompts' order, each with its embedding."""
    data = []
    for index, output in enumerate(outputs):
        if output.embedding is None:
            raise ApiError(500, output.error or "the prompt was not computed")
        data.append({"object": "embedding", "index": index, "embedding": _encoded(output.embedding, ask.base64)})
    counts = usage(outputs)
    del counts["completion_tokens"]
    return {"object": "list", "data": data, "model": model, "usage": counts}


def _encoded(vector: np.ndarray, as_base64: bool) -> str | list[float]:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()

"""What clients send and get, in OpenAI's shapes: bodies to `SamplingParams`, deltas to choices and chunks."""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jaxcache.engine import RequestOutput, SamplingParams, TopLogprobs
from jaxcache.models.tokenizer import TextTokenizer

ParamsT = TypeVar("ParamsT")

_SAMPLING = frozenset(
    [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "prompt_logprobs",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "skip_reading_prefix_cache",
        "skip_writing_prefix_cache",
        "cache_retention",
    ]
)
_COMMON = frozenset(["model", "stream", "stream_options", "cache_salt", "priority"])
_COMPLETION = frozenset(["prompt", "logprobs"])
_CHAT = frozenset(["messages", "logprobs", "top_logprobs", "max_completion_tokens", "chat_template_kwargs"])
IGNORED = frozenset(["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"])
"""Says nothing about the answer: taken and left alone."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dimensions": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}
"""What is not supported, with the values that ask for nothing."""


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": str(self), "type": _kind(self.status), "param": self.param, "code": self.code}
        }


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


@dataclass(frozen=True)
class Ask:
    """A generation request, checked."""

    prompts: list[Any]
    """Texts or token ids; conversations where `chat`."""
    params: SamplingParams
    chat: bool
    stream: bool = False
    include_usage: bool = False
    cache_salt: str | None = None
    priority: int = 0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    created: int = 0
    adapter: str | None = None
    """What `model` named, where it was no model of its own."""

    @property
    def num_answers(self) -> int:
        """To all prompts together."""
        return len(self.prompts) * self.params.n


def parse_completion(body: Mapping[str, Any], model: str) -> Ask:
    """`/v1/completions`. An `ApiError` (400, 404) for what cannot be done."""
    check_fields(body, _SAMPLING | _COMMON | _COMPLETION)
    if "prompt" not in body:
        raise ApiError(400, "prompt is missing: give a text, token ids, or a list of either", param="prompt")
    logprobs = body.get("logprobs")
    if isinstance(logprobs, bool):
        raise ApiError(400, "logprobs must be an integer or null", param="logprobs")
    return _ask(
        body,
        model,
        prompts(body["prompt"], "prompt"),
        chat=False,
        logprobs=logprobs,
        max_tokens=body.get("max_tokens", 16),
    )


def parse_chat(body: Mapping[str, Any], model: str) -> Ask:
    """`/v1/chat/completions`. An `ApiError` (400, 404) for what cannot be done."""
    check_fields(body, _SAMPLING | _COMMON | _CHAT)
    wanted = body.get("logprobs") or False
    if not isinstance(wanted, bool):
        raise ApiError(400, f"logprobs must be true or false, got {wanted!r}", param="logprobs")
    if body.get("top_logprobs") is not None and not wanted:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.get("top_logprobs") or 0) if wanted else None
    limit = body.get("max_completion_tokens")
    if limit is None:
        limit = body.get("max_tokens")
    messages, variables = conversation(body)
    ask = _ask(body, model, [messages], chat=True, logprobs=logprobs, max_tokens=limit)
    return replace(ask, chat_template_kwargs=variables)


def conversation(body: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The messages and variables of a chat template. An `ApiError` (400) for what cannot be given to one."""
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise ApiError(
            400, f"chat_template_kwargs must be an object, got {variables!r}", param="chat_template_kwargs"
        )
    if ours := variables.keys() & {"self", "template", "messages", "bos_token", "eos_token"}:
        raise ApiError(400, f"chat_template_kwargs may not set {min(ours)}", param="chat_template_kwargs")
    return _plain(body.get("messages")), variables


def _plain(messages: Any) -> Any:
    """`messages` with contents that are lists of text parts as one text each, a line per part."""
    if not isinstance(messages, list):
        return messages
    plain = []
    for nth, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                    kind = part.get("type") if isinstance(part, dict) else part
                    raise ApiError(400, f"messages[{nth}] has a part that is no text: {kind!r}", param="messages")
            message = message | {"content": "\n".join(part["text"] for part in content)}
        plain.append(message)
    return plain


def _ask(
    body: Mapping[str, Any], model: str, asked: list[Any], *, chat: bool, logprobs: Any, max_tokens: Any
) -> Ask:
    check_model(body, model)
    given = {name: body[name] for name in _SAMPLING & body.keys() if body[name] is not None}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs}
    params = made(SamplingParams, given)
    stream, options = body.get("stream") or False, body.get("stream_options") or {}
    if not isinstance(stream, bool):
        raise ApiError(400, f"stream must be true or false, got {stream!r}", param="stream")
    if options and not stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if params.prompt_logprobs is not None and stream:
        raise ApiError(400, "prompt_logprobs come with whole answers only, not with stream: true", param="stream")
    if not isinstance(options, Mapping) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, f"stream_options may have include_usage, got {options!r}", param="stream_options")
    name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    return Ask(
        asked,
        params,
        chat,
        stream,
        bool(options.get("include_usage")),
        cache_salt(body),
        priority(body),
        id=name,
        created=int(time.time()),
    )


def check_fields(body: Mapping[str, Any], known: frozenset[str]) -> None:
    """Nothing that changes the answer is dropped in silence: a 400 for fields that are not `known`. Null asks for
    nothing."""
    for name in body.keys() - known - IGNORED:
        value = body[name]
        if value is None:
            continue
        if name not in _NEUTRAL:
            raise ApiError(
                400, f"{name} is not a parameter of this endpoint", code="unknown_parameter", param=name
            )
        if value not in _NEUTRAL[name]:
            raise ApiError(
                400, f"{name} is not supported here: leave it out", code="unsupported_parameter", param=name
            )


def check_model(body: Mapping[str, Any], model: str) -> None:
    """A 404 for another model's name."""
    if (asked := body.get("model")) is not None and asked != model:
        raise no_model(asked, [model])


def no_model(asked: Any, known: Iterable[str]) -> ApiError:
    names = ", ".join(repr(name) for name in known)
    return ApiError(404, f"there is no model {asked!r} here, only {names}", code="model_not_found", param="model")


def cache_salt(body: Mapping[str, Any]) -> str | None:
    if not isinstance(salt := body.get("cache_salt"), str | None):
        raise ApiError(400, f"cache_salt must be a string, got {salt!r}", param="cache_salt")
    return salt


def priority(body: Mapping[str, Any]) -> int:
    value = body.get("priority") or 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError(400, f"priority must be an integer, got {value!r}", param="priority")
    return value


def prompts(prompt: Any, field: str) -> list[Any]:
    """A text, texts, token ids, or lists of token ids as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str | list) for item in prompt):
            return prompt
        if not any(isinstance(item, str | list) for item in prompt):
            return [prompt]
    raise ApiError(400, f"{field} must be a text, token ids, or a list of either, not empty", param=field)


def made(params: Callable[..., ParamsT], given: Mapping[str, Any]) -> ParamsT:
    """`params(**given)`; its `ValueError`, which begins with the field, as a 400."""
    try:
        return params(**given)
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).split()[0]) from error


# Answers


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Token counts; those taken from the cache are always told, 0 where nothing was."""
    outputs = list(outputs)
    prompt = sum(output.num_prompt_tokens for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def chat_logprobs(tokenizer: TextTokenizer | None, logprobs: Sequence[TopLogprobs]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(tokenizer, token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            entry(position.token_id, position.logprob) | {"top_logprobs": [entry(*top) for top in position.top]}
            for position in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: TextTokenizer | None, logprobs: Sequence[TopLogprobs], offset: int
) -> dict[str, Any]:
    """`offset`: characters before the first of these tokens."""

    def text(token_id: int) -> str:
        return token_bytes(tokenizer, token_id).decode(errors="replace")

    tokens, offsets = [text(position.token_id) for position in logprobs], []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [position.logprob for position in logprobs],
        "top_logprobs": [{text(i): value for i, value in position.top} for position in logprobs],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: TextTokenizer | None, logprobs: Sequence[TopLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's form: per prompt token, by token id, the token itself and the likeliest ones. A token that is not
    among these has no rank."""

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = token_bytes(tokenizer, token_id).decode(errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    def entries(position: TopLogprobs) -> dict[str, Any]:
        top = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(position.top, 1)}
        return {str(position.token_id): entry(position.token_id, position.logprob, None)} | top

    return [None if position is None else entries(position) for position in logprobs]


def token_bytes(tokenizer: TextTokenizer | None, token_id: int) -> bytes:
    """A token's bytes; its number where there is no tokenizer."""
    return str(token_id).encode() if tokenizer is None else tokenizer.token_bytes(token_id)

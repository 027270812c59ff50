"""What a request may ask of sampling, checked where it is asked."""

import math
import operator
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

from jaxcache.core.request import MAX_TOKEN_ID, check_retention
from jaxcache.settings import settings

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: division by them would leave only the largest logit anyway."""

MAX_LOGPROBS = 20
"""Most alternatives per token that a request may ask for; the step always computes this many or none."""

MAX_SUPPRESSED = 16
"""Token ids that `min_tokens` can hold back at once: end-of-sequence ids and `stop_token_ids` together."""

MAX_STOP_IDS_WITH_MIN_TOKENS = MAX_SUPPRESSED // 2


@settings
class SamplingParams:
    """How a request's tokens are chosen and when it ends. A value that is not allowed is a `ValueError`.

    `stop` and `stop_token_ids` may be given as any sequence (`stop` also as one string) and are kept as tuples.
    """

    _: KW_ONLY
    n: int = 1
    """Answers to generate for the prompt."""
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id where several are equal."""
    top_p: float = 1.0
    """Only the fewest most likely tokens whose probabilities reach this sum; 1 is off."""
    top_k: int = 0
    """Only this many most likely tokens (all that equal the last one count in); 0 or -1 is off."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one; 0 is off."""
    seed: int | None = None
    """Same seed, same prompt, same answer, whatever else is in the batch. 64 bits; None draws one."""
    max_tokens: int | None = 16
    """None: until the context is full."""
    min_tokens: int = 0
    """Until there are this many, no end-of-sequence or stop id can be chosen and no stop string is looked for."""
    stop: str | Sequence[str] | None = ()
    """Strings that end the answer."""
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text; the token ids always have them."""
    logprobs: int | None = None
    """Alternatives to report per generated token; 0 reports the chosen token alone."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt. The whole prompt is then computed anew, see `skip_reading_prefix_cache`."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt (its blocks are cached all the same). None: only where `prompt_logprobs` asks."""
    skip_writing_prefix_cache: bool = False
    """Leave nothing of this request for others to find."""
    cache_retention: str = "default"
    """How long others can find what it leaves: as the eviction policy has it ("default"), until there is need of
    room, before anything else goes ("low"), or not at all ("none")."""

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1))
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, exclude_low=True))
        self._set("top_k", min(max(0, _integer("top_k", self.top_k, -1)), MAX_TOKEN_ID))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -(2**63), 2**63 - 1))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1))
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.min_tokens and len(self.stop_token_ids or ()) > MAX_STOP_IDS_WITH_MIN_TOKENS:
            raise ValueError(
                f"min_tokens can hold back {MAX_STOP_IDS_WITH_MIN_TOKENS} stop_token_ids at most, "
                f"got {len(self.stop_token_ids or ())}: give fewer, or min_tokens=0"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _boolean(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.skip_reading_prefix_cache is None:
            self._set("skip_reading_prefix_cache", self.prompt_logprobs is not None)
        _boolean("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        _boolean("skip_writing_prefix_cache", self.skip_writing_prefix_cache)
        check_retention(self.cache_retention)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def ending_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Token ids that end the request: its own, and the model's unless `ignore_eos`."""
        eos = () if self.ignore_eos else eos_token_ids
        return tuple(dict.fromkeys((*eos, *(self.stop_token_ids or ()))))

    def suppressed_ids(self, eos_token_ids: Sequence[int], num_output_tokens: int) -> tuple[int, ...]:
        """Token ids that may not be chosen next, since `min_tokens` are not there yet."""
        return self.ending_ids(eos_token_ids) if num_output_tokens < self.min_tokens else ()


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    try:
        result = operator.index(value)
    except TypeError:
        result = None
    if isinstance(value, bool) or result is None or result < low or (high is not None and result > high):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return result


def _number(name: str, value: Any, low: float, high: float, *, exclude_low: bool = False) -> float:
    comparison = "above" if exclude_low else "of at least"
    allowed = f"a number {comparison} {low:g}" + (f" and at most {high:g}" if high < math.inf else ", finite")
    try:
        result = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, OverflowError):
        result = math.nan
    inside = low < result if exclude_low else low <= result
    if not (inside and result <= high and math.isfinite(result)):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return result


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _sequence(name, value, "a string or a sequence of strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise ValueError(f"{name} must hold strings that are not empty, got {item!r}")
    return items


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = _sequence(name, value, "a sequence of token ids")
    return tuple(_integer(f"{name}[{i}]", item, 0, MAX_TOKEN_ID) for i, item in enumerate(items))


def _sequence(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return tuple(value)

"""What the engine gives back."""

from dataclasses import dataclass, field

import numpy as np

from jaxcache.engine.core import TopLogprobs


@dataclass
class Completion:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] | None = None
    """Per token, if asked for."""
    finish_reason: str | None = None
    """stop, length, abort or error; `None` while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; `None` for the model's own end-of-sequence token."""
    error: str | None = None


@dataclass
class RequestOutput:
    """A request that has ended, or how far it got."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was taken from the cache."""
    prompt_logprobs: list[TopLogprobs | None] | None = None
    """Per prompt token (the first has none), if asked for."""
    embedding: np.ndarray | None = None
    """float32 [width], once computed, if the request had `PoolingParams`."""
    arrival_time: float = 0.0
    """Seconds, as `time.perf_counter` counts them; so are the others."""
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def text(self) -> str:
        """The first answer."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.completions[0].error

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finish_time is None else self.finish_time - self.arrival_time


@dataclass(frozen=True)
class Delta:
    """What one step added to one answer."""

    request_id: str
    index: int
    text: str
    """Text that is certain now: no half characters, nothing that a stop string may take back."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TopLogprobs, ...]
    finish_reason: str | None
    output: RequestOutput
    """The request as it stands."""

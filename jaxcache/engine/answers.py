"""From tokens to answers: what the core is asked for each, its text so far, and what ends it."""

from dataclasses import dataclass, field, replace

import numpy as np

from jaxcache.core.request import Request
from jaxcache.engine.core import CoreOutput
from jaxcache.engine.detokenizer import Detokenizer, StopChecker
from jaxcache.engine.outputs import Completion, RequestOutput
from jaxcache.engine.pooling_params import PoolingParams
from jaxcache.engine.sampling_params import SamplingParams
from jaxcache.models.tokenizer import TextTokenizer

RequestParams = SamplingParams | PoolingParams
"""What a request asks for: an answer, or an embedding."""


@dataclass
class Answer:
    """One running completion, or embedding: its request, and its place in the output."""

    request: Request
    output: RequestOutput
    completion: Completion
    params: RequestParams
    detokenizer: Detokenizer | None = None
    stop: StopChecker = field(default_factory=lambda: StopChecker(()))

    @classmethod
    def begin(
        cls,
        request: Request,
        output: RequestOutput,
        completion: Completion,
        params: RequestParams,
        tokenizer: TextTokenizer | None,
    ) -> "Answer":
        """An answer without tokens yet."""
        answer = cls(request, output, completion, params)
        if isinstance(params, PoolingParams):
            return answer
        if params.logprobs is not None:
            completion.logprobs = []
        if tokenizer is not None:
            answer.detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        answer.stop = StopChecker(params.stop or (), include_stop_str=params.include_stop_str_in_output)
        return answer

    def take(self, core: CoreOutput, now: float) -> str:
        """Enter one step's result. Returns the text that it made certain."""
        output, completion = self.output, self.completion
        if core.token_id is not None:
            output.first_token_time = output.first_token_time or now
            completion.token_ids.append(core.token_id)
            if completion.logprobs is not None and core.logprobs is not None:
                completion.logprobs.append(core.logprobs)
        if core.prompt_logprobs is not None:
            output.prompt_logprobs = core.prompt_logprobs
        if core.embedding is not None:
            output.embedding = self._scaled(core.embedding)
        if completion.index == 0 and core.request.num_cached_tokens is not None:
            output.num_cached_tokens = core.request.num_cached_tokens
        return self._text(core)

    def _text(self, core: CoreOutput) -> str:
        """A token that ends the answer is not text."""
        if self.detokenizer is None or isinstance(self.params, PoolingParams):
            return ""
        text = ""
        if core.token_id is not None and core.stop_token_id is None:
            piece = self.detokenizer.append(core.token_id)
            looking = len(self.completion.token_ids) > self.params.min_tokens
            text = self.stop.append(piece) if looking else piece
        if core.finished and self.stop.matched is None:
            text += self.stop.append(self.detokenizer.flush())
            text += self.stop.flush()
        self.completion.text += text
        return text

    def _scaled(self, embedding: np.ndarray) -> np.ndarray:
        if not isinstance(self.params, PoolingParams) or not self.params.normalize:
            return embedding
        return embedding / max(np.linalg.norm(embedding), np.finfo(np.float32).tiny)


def num_answers(params: RequestParams) -> int:
    """To one prompt."""
    return params.n if isinstance(params, SamplingParams) else 1


def for_core(params: RequestParams, index: int) -> tuple[SamplingParams, str | None]:
    """What the core is asked for: how to sample the answer of that index, or how to pool.

    Of several answers to one prompt with a seed, each has its own seed, the first the one given.
    """
    if isinstance(params, PoolingParams):
        sampling = SamplingParams(
            skip_reading_prefix_cache=params.skip_reading_prefix_cache,
            skip_writing_prefix_cache=params.skip_writing_prefix_cache,
            cache_retention=params.cache_retention,
        )
        return sampling, params.pooling
    if params.seed is None or index == 0:
        return params, None
    return replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63), None

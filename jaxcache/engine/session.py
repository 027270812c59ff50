"""A conversation that goes on turn by turn."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxcache.core.request import pack_token_ids
from jaxcache.engine.inputs import Feature, Prompt, PromptInputs
from jaxcache.engine.outputs import Delta, RequestOutput
from jaxcache.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxcache.engine.engine import Engine


class Session:
    """The tokens of a conversation so far, and what they were computed with. Each turn adds to them.

    A turn is a request over all tokens, which finds those of the turns before in the cache. Between turns nothing
    is held: an idle session costs no blocks, and loses them under pressure as everybody does. Names of blocks are
    made anew from each turn's tokens, so that what was dropped is in none of them.
    """

    def __init__(
        self, engine: "Engine", *, adapter: str | None = None, cache_salt: str | None = None, priority: int = 0
    ) -> None:
        self._engine = engine
        self._identity = {"adapter": adapter, "cache_salt": cache_salt, "priority": priority}
        self._token_ids: list[int] = []
        self._features: tuple[Feature, ...] = ()
        self._turn: RequestOutput | None = None
        """The latest, until its tokens are taken in."""
        self._turn_features: tuple[Feature, ...] = ()
        self._keep_answer = True

    @property
    def token_ids(self) -> list[int]:
        """Prompts and answers of all turns that have ended. One that ended in an error never was."""
        self._take_in()
        return list(self._token_ids)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, keep_answer: bool = True) -> str:
        """Queue the next turn; the request's id, as `Engine.add_request` gives it.

        Offsets of features count from the beginning of `prompt`. `keep_answer`: whether the session goes on behind
        what is generated, or behind `prompt`. A `ValueError` while the turn before has not ended.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"a session goes on behind one answer: a turn cannot have n = {params.n}")
        self._take_in()
        if self._turn is not None:
            raise ValueError(
                f"the session's turn {self._turn.request_id!r} has not ended: step until it has, or abort it"
            )
        new, features = self._inputs(prompt)
        shifted = [replace(feature, offset=feature.offset + len(self._token_ids)) for feature in features]
        features = (*self._features, *shifted)
        whole = PromptInputs([*self._token_ids, *new], features)
        request_id = self._engine.add_request(whole, params, **self._identity)
        self._turn, self._turn_features = self._engine.output(request_id), features
        self._keep_answer = keep_answer
        return request_id

    def ask(
        self, prompt: Prompt, params: SamplingParams | None = None, *, keep_answer: bool = True
    ) -> RequestOutput:
        """The next turn, computed to its end."""
        request_id = self.add(prompt, params, keep_answer=keep_answer)
        output = self._engine.output(request_id)
        for _ in self._engine.follow(request_id):
            pass
        return output

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The next turn, piece by piece. Leaving the loop early aborts it; what it has by then is kept."""
        return self._engine.follow(self.add(prompt, params))

    def feed(self, prompt: Prompt) -> None:
        """Compute `prompt` ahead of the question that will follow it; the session goes on behind it."""
        self.ask(prompt, SamplingParams(max_tokens=1, temperature=0.0), keep_answer=False)

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens past the first `num_tokens`, and the features that do not end before."""
        self._take_in()
        if self._turn is not None or not 0 <= num_tokens <= len(self._token_ids):
            raise ValueError(f"cannot keep {num_tokens} tokens of {self!r}")
        del self._token_ids[num_tokens:]
        self._features = tuple(one for one in self._features if one.offset + len(one.embeds) <= num_tokens)

    def _take_in(self) -> None:
        """If the latest turn has ended, its tokens are part of what comes before the next."""
        turn = self._turn
        if turn is None or not turn.finished:
            return
        if turn.finish_reason != "error":
            self._token_ids = turn.prompt_token_ids + (turn.token_ids if self._keep_answer else [])
            self._features = self._turn_features
        self._turn = None

    def _inputs(self, prompt: Prompt) -> tuple[list[int], tuple[Feature, ...]]:
        """A turn's own tokens, and the features on them. Only a conversation's first text begins as texts do."""
        if isinstance(prompt, str):
            return self._engine.encode(prompt, add_special_tokens=not self._token_ids), ()
        if isinstance(prompt, PromptInputs):
            if prompt.token_ids is None:
                raise ValueError("a session's turns are text, tokens, or tokens with features: give a Feature")
            return pack_token_ids(prompt.token_ids).tolist(), tuple(prompt.features)
        return pack_token_ids(prompt).tolist(), ()

    def __repr__(self) -> str:
        state = "" if self._turn is None else f", turn {self._turn.request_id!r} running"
        return f"Session({len(self._token_ids)} tokens{state})"

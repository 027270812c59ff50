"""The engine on token ids: schedule, run, update."""

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.core.events import KVEventsConfig
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.scheduler import ScheduledTokens, Scheduler, StepPlan
from jaxcache.engine.adapters import AdapterTable, LoadedAdapter
from jaxcache.engine.groups import kv_cache_groups
from jaxcache.engine.inputs import PlacedRows, PromptInputs, rows_between
from jaxcache.engine.multi_step import MAX_ENDING_IDS
from jaxcache.engine.runner import ModelRunner, RunningSequence, SampledRow, StepResult, TokenLogprobs
from jaxcache.engine.sampling_params import MAX_SUPPRESSED, SamplingParams
from jaxcache.engine.step_inputs import SequenceSlice
from jaxcache.models.lora import LoRAAdapter

logger = logging.getLogger(__name__)

MAX_IDLE_STEPS = 8
"""Steps in a row that may compute nothing while requests wait, before that is an error."""


@dataclass(frozen=True)
class TopLogprobs:
    """One position: the token there, its log probability, and the likeliest tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), likeliest first."""


@dataclass
class CoreRequest:
    """What the engine keeps of a request besides what the scheduler does."""

    request: Request
    params: SamplingParams
    seed: int
    ending_ids: frozenset[int]
    adapter: LoadedAdapter | None = None
    rows: tuple[PlacedRows, ...] = ()
    """What stands in the place of prompt tokens' embeddings."""
    prompt_logprobs: list[TopLogprobs | None] = field(default_factory=list)
    """Per prompt position; the first has none."""
    hidden_sum: np.ndarray | None = None
    """Of the rows computed so far, for mean pooling."""


@dataclass(frozen=True)
class CoreOutput:
    """What a step did for one request."""

    request: Request
    token_id: int | None = None
    logprobs: TopLogprobs | None = None
    finished: bool = False
    stop_token_id: int | None = None
    """The token that ended the request, if one did."""
    prompt_logprobs: list[TopLogprobs | None] | None = None
    """With the first token, if the request asked for them."""
    embedding: np.ndarray | None = None
    """float32 [width], for a request that pools instead of generating."""


class StepFindings(NamedTuple):
    """What a step's device calls found, by place in the plan."""

    tokens: dict[int, int]
    """The next token of each request that samples."""
    logprobs: dict[int, TopLogprobs]
    """Of those that asked."""
    pooled: dict[int, tuple[np.ndarray, np.ndarray]]
    """Of each request that pools, its rows' sum and the last of them."""


class EngineCore:
    """Requests in, tokens out. Each `step` schedules, runs the device once, and updates.

    A step that raises leaves a working engine: its requests end in error, nothing that it would have written can
    be found, and if the KV array went down with it, the cache starts empty and other requests are computed again.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        causal: bool = True,
        embeds_only: str | None = None,
        events: KVEventsConfig | None = None,
    ) -> None:
        self.runner = runner
        self.adapters = AdapterTable(runner)
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = runner.config.vocab_size
        self._embeds_only = embeds_only
        """Why the model gives embeddings and no text, if so."""
        caching = cache.enable_prefix_caching
        if caching and not causal:
            logger.warning(
                "prefix caching is off: this model's attention is not causal, so KV depends on what comes after"
            )
            caching = False
        if not causal:
            scheduler = replace(scheduler, enable_chunked_prefill=False, long_prefill_token_threshold=0)
        self.kv = KVCacheManager(
            kv_cache_groups(runner.config, cache.block_size),
            num_blocks,
            max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            enable_caching=caching,
            hash_block_size=cache.hash_block_size,
            watermark=scheduler.watermark,
            events=events,
            eviction_policy=cache.eviction_policy,
        )
        self._block_hasher = None
        if caching:
            self._block_hasher = get_request_block_hasher(
                self.kv.hash_block_size, cache.prefix_caching_hash_algo, cache.hash_seed
            )
        if scheduler.decode_steps > 1 and not (len(self.kv.groups) == 1 and self.kv.coordinator.keeps_everything):
            logger.warning("decode_steps is 1 for this model: it needs one KV-cache group, of full attention")
            scheduler = replace(scheduler, decode_steps=1)
        self.scheduler = Scheduler(self.kv, scheduler)
        self._requests: dict[str, CoreRequest] = {}
        self._idle_steps = 0

    # Requests come and go

    def add_request(
        self,
        request_id: str,
        prompt: Iterable[int] | PromptInputs,
        params: SamplingParams,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        pooling: str | None = None,
    ) -> Request:
        """Queue a request; a `ValueError` for a prompt that can never be computed.

        `pooling`: "last" or "mean" gives an embedding of the prompt instead of generating.
        """
        if pooling not in (None, "last", "mean"):
            raise ValueError(f"pooling must be 'last' or 'mean', got {pooling!r}")
        if pooling is None and self._embeds_only:
            raise ValueError(
                f"this model cannot generate: {self._embeds_only}. Ask for an embedding (Engine.embed)"
            )
        ending = frozenset(params.ending_ids(self.eos_token_ids))
        if params.min_tokens and len(ending) > MAX_SUPPRESSED:
            raise ValueError(
                f"min_tokens can hold back {MAX_SUPPRESSED} token ids, but {len(ending)} end this request: give "
                "fewer stop_token_ids, or min_tokens=0"
            )
        inputs = prompt if isinstance(prompt, PromptInputs) else PromptInputs(prompt)
        self._check_rows(inputs.rows)
        loaded = None if adapter is None else self.adapters[adapter]
        request = Request(
            request_id,
            inputs.token_ids,
            max_tokens=self.kv.max_model_len if params.max_tokens is None else params.max_tokens,
            adapter=None if loaded is None else loaded.name,
            adapter_id=None if loaded is None else loaded.version,
            features=[feature.place for feature in inputs.features],
            prompt_embeds=inputs.embeds,
            cache_salt=cache_salt,
            prompt_logprobs=params.prompt_logprobs,
            pooling=pooling,
            skip_reading_prefix_cache=params.skip_reading_prefix_cache or None,
            skip_writing_prefix_cache=params.skip_writing_prefix_cache,
            cache_retention=params.cache_retention,
            priority=priority,
            arrival_time=arrival_time,
            vocab_size=self.vocab_size,
            block_hasher=self._block_hasher,
        )
        self.scheduler.add_request(request)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._requests[request_id] = CoreRequest(request, params, seed, ending, loaded, inputs.rows)
        return request

    def _check_rows(self, placed: Sequence[PlacedRows]) -> None:
        width = self.runner.embeds_width
        for _, rows in placed:
            if width is None:
                raise ValueError("this model's config has no hidden_size, so it takes no embeddings")
            if rows.shape[1] != width:
                raise ValueError(
                    f"embeddings must be as wide as the model's, which is {width}, got {rows.shape[1]}"
                )

    def load_adapter(self, name: str, adapter: LoRAAdapter, replace: bool = False) -> LoadedAdapter:
        """New requests may name it from now on; see `AdapterTable.load`."""
        in_use = {entry.adapter for entry in self._requests.values() if entry.adapter is not None}
        return self.adapters.load(name, adapter, replace=replace, in_use=in_use)

    def finish(self, request_id: str, status: RequestStatus) -> None:
        """End a request from outside; unknown and finished ones are left alone."""
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            self.scheduler.finish(entry.request, status)

    def is_active(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    # One step

    def step(self) -> list[CoreOutput]:
        """Compute one step, or a few where that is the same. Returns what it did, token by token."""
        if outputs := self._generate_ahead():
            return outputs
        plan = self.scheduler.schedule()
        outputs = [CoreOutput(request, finished=True) for request in plan.refused]
        for request in plan.refused:
            self._requests.pop(request.request_id)
        self._idle_steps = 0 if plan.scheduled or plan.refused or not self.has_unfinished else self._idle_steps + 1
        if self._idle_steps > MAX_IDLE_STEPS:
            raise RuntimeError(f"no progress in {self._idle_steps} steps: {self.scheduler.describe()}")
        if plan.scheduled:
            found = self._run(plan)
            self.scheduler.commit(plan)
            outputs += self._update(plan, found)
        return outputs

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached content. While requests run: `False`, saying who, or have them computed again."""
        if not reset_running and self.scheduler.running:
            logger.warning(
                "the prefix cache was not reset: %d blocks are held by %s",
                self.kv.num_held,
                [request.request_id for request in self.scheduler.running],
            )
            return False
        return self.scheduler.reset_prefix_cache(reset_running)

    def update_params(self, params: Any) -> None:
        """Other weights: nothing computed with the old ones is found again, and running requests start over."""
        self.runner.update_params(params)
        self.scheduler.reset_prefix_cache(reset_running=True)

    def _run(self, plan: StepPlan) -> StepFindings:
        """All that the device has to say about the step; if it fails, the step has not been."""
        entries = [self._requests[entry.request.request_id] for entry in plan.scheduled]
        slices = [self._slice(entry) for entry in plan.scheduled]
        rows = [
            SampledRow(e.params, e.seed, e.params.suppressed_ids(self.eos_token_ids, e.request.num_output_tokens))
            for e in entries
        ]
        try:
            result = self.runner.run(slices, rows)
            pooled = {}
            for nth, entry in enumerate(plan.scheduled):
                first_row = int(result.first_rows[nth])
                self._collect_prompt_logprobs(entry, result, first_row)
                if entry.request.pooling is not None:
                    pooled[nth] = self.runner.pool_rows(result, first_row, entry.num_tokens)
            sampled = [n for n, e in enumerate(plan.scheduled) if e.samples and e.request.pooling is None]
            logprobs = self._sampled_logprobs(plan, sampled, result)
        except BaseException as error:
            self._abandon(plan, error)
            raise
        return StepFindings({nth: int(result.tokens[nth]) for nth in sampled}, logprobs, pooled)

    def _generate_ahead(self) -> list[CoreOutput]:
        """Several steps of one token per request in one device call, if nothing else is to do; else nothing."""
        num_steps = self.scheduler.config.decode_steps
        plan = self.scheduler.plan_of_decodes() if num_steps > 1 else None
        if plan is None:
            return []
        requests = [entry.request for entry in plan.scheduled]
        entries = [self._requests[request.request_id] for request in requests]
        if not all(self._can_loop(entry) for entry in entries):
            return []
        running = [
            RunningSequence(
                SampledRow(entry.params, entry.seed, ()),
                entry.request.all_token_ids[-1],
                entry.request.num_tokens,
                self.kv.coordinator.block_ids(entry.request.request_id)[0],
                min(entry.request.num_prompt_tokens + entry.request.max_tokens, self.kv.max_model_len),
                entry.ending_ids,
                0 if entry.adapter is None else entry.adapter.slot,
            )
            for entry in entries
        ]
        try:
            tokens, new_blocks, pool_state = self.runner.run_steps(running, self.kv.pool, num_steps)
        except BaseException as error:
            self._abandon(plan, error)
            raise
        outputs = []
        for nth, row in enumerate(tokens.tolist()):
            if nth == len(tokens) - 1:  # whatever ends, ends now: all before is computed and can be found
                for request in requests:
                    request.num_computed_tokens += len(tokens)
                self.kv.adopt_decodes(requests, new_blocks, pool_state)
            for request, token in zip(requests, row):
                request.append_output_token_ids(token)
                outputs.append(self._output(request, token, None))
        return outputs

    def _can_loop(self, entry: CoreRequest) -> bool:
        """Whether nobody has to look at the request between its tokens."""
        params, request = entry.params, entry.request
        held_back = params.suppressed_ids(self.eos_token_ids, request.num_output_tokens)
        few = len(entry.ending_ids) <= MAX_ENDING_IDS
        embedded = entry.rows and request.num_output_tokens == 0
        return few and not (held_back or params.stop or params.logprobs is not None or request.pooling or embedded)

    def _slice(self, entry: ScheduledTokens) -> SequenceSlice:
        block_ids = self.kv.coordinator.block_ids(entry.request.request_id)
        token_ids = np.frombuffer(entry.request.all_token_ids[entry.start : entry.stop], np.int32)
        core = self._requests[entry.request.request_id]
        slot = 0 if core.adapter is None else core.adapter.slot
        rows = rows_between(core.rows, entry.start, entry.stop) if core.rows else ()
        return SequenceSlice(token_ids, entry.start, block_ids, slot, rows)

    def _abandon(self, plan: StepPlan, error: BaseException) -> None:
        self.scheduler.abandon(plan, f"the step failed: {error!r}")
        for entry in plan.scheduled:
            self._requests.pop(entry.request.request_id)
        if self.runner.kv_lost:
            self.scheduler.reset_prefix_cache(reset_running=True)
            self.runner.reset_kv()

    def _update(self, plan: StepPlan, found: StepFindings) -> list[CoreOutput]:
        outputs = []
        for nth, rows in found.pooled.items():
            outputs += self._pool(plan.scheduled[nth], *rows)
        for nth, token in found.tokens.items():
            request = plan.scheduled[nth].request
            request.append_output_token_ids(token)
            outputs.append(self._output(request, token, found.logprobs.get(nth)))
        return outputs

    def _pool(self, entry: ScheduledTokens, total: np.ndarray, last: np.ndarray) -> list[CoreOutput]:
        """Take a pooling request's rows in: their sum and the last. Its embedding, once the prompt is computed."""
        core, request = self._requests[entry.request.request_id], entry.request
        core.hidden_sum = total if core.hidden_sum is None or entry.start == 0 else core.hidden_sum + total
        if not entry.samples:
            return []
        self.finish(request.request_id, RequestStatus.FINISHED_STOPPED)
        embedding = last if request.pooling == "last" else core.hidden_sum / request.num_tokens
        return [CoreOutput(request, finished=True, embedding=embedding)]

    def _output(self, request: Request, token: int, logprobs: TopLogprobs | None) -> CoreOutput:
        entry = self._requests[request.request_id]
        stopped = token in entry.ending_ids
        full = request.num_output_tokens >= request.max_tokens or request.num_tokens >= self.kv.max_model_len
        if stopped or full:
            self.finish(
                request.request_id,
                RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_LENGTH,
            )
        return CoreOutput(
            request,
            token,
            logprobs,
            finished=stopped or full,
            stop_token_id=token if stopped else None,
            prompt_logprobs=entry.prompt_logprobs or None if request.num_output_tokens == 1 else None,
        )

    # Log probabilities

    def _sampled_logprobs(self, plan: StepPlan, sampled: list[int], result: StepResult) -> dict[int, TopLogprobs]:
        """For the sequences that asked, by their place in the plan."""
        wanted, counts = [], []
        for nth in sampled:
            params = self._requests[plan.scheduled[nth].request.request_id].params
            if params.logprobs is not None:
                wanted.append(nth)
                counts.append(params.logprobs)
        if not wanted:
            return {}
        rows = np.array([result.first_rows[nth] + plan.scheduled[nth].num_tokens - 1 for nth in wanted])
        answer = self.runner.logprobs(result, rows, result.tokens[wanted])
        return {
            nth: _position(answer, i, int(result.tokens[nth]), k) for i, (nth, k) in enumerate(zip(wanted, counts))
        }

    def _collect_prompt_logprobs(self, entry: ScheduledTokens, result: StepResult, first_row: int) -> None:
        """The row at position p predicts the token at p + 1."""
        core = self._requests[entry.request.request_id]
        count, request = core.params.prompt_logprobs, entry.request
        if count is None:
            return
        if not core.prompt_logprobs:
            core.prompt_logprobs.append(None)
        start = max(entry.start, len(core.prompt_logprobs) - 1)
        stop = min(entry.stop, request.num_prompt_tokens - 1)
        if start >= stop:
            return
        token_ids = np.frombuffer(request.all_token_ids[start + 1 : stop + 1], np.int32)
        rows = np.arange(start, stop) - entry.start + first_row
        answer = self.runner.logprobs(result, rows, token_ids)
        core.prompt_logprobs += [_position(answer, i, token, count) for i, token in enumerate(token_ids.tolist())]


def _position(answer: TokenLogprobs, i: int, token: int, count: int) -> TopLogprobs:
    top = zip(answer.top_ids[i, :count].tolist(), answer.top_logprobs[i, :count].tolist())
    return TopLogprobs(token, float(answer.logprobs[i]), tuple(top))

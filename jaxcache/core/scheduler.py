"""What to compute in each step: one token budget for prompts and for generation alike."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.config import SchedulerConfig
from jaxcache.core.queue import make_queue
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.stats import PrefixCacheStats


class ScheduledTokens(NamedTuple):
    """Tokens `[start, stop)` of one request."""

    request: Request
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that its output predicts a new one."""
        return self.stop == self.request.num_tokens


@dataclass
class StepPlan:
    """One step: what is computed, and what happened to requests on the way."""

    budget: int
    """Tokens that may still be added."""
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    refused: list[Request] = field(default_factory=list)
    """Requests that can never fit; their `error` says why."""

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)

    def add(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        self.scheduled.append(ScheduledTokens(request, start, start + num_tokens))
        self.budget -= num_tokens

    def remove(self, request: Request) -> None:
        """Take a request out again, if it is in."""
        for entry in self.scheduled:
            if entry.request is request:
                self.scheduled.remove(entry)
                self.budget += entry.num_tokens
                return


class Scheduler:
    """Plans steps and keeps each request's state. It never runs anything.

    `schedule` plans a step; then `commit` says that it was computed, or `abandon` that it was not. A request's
    blocks are given back when it finishes, is aborted or is preempted, whichever comes first.
    """

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig) -> None:
        if kv.states_at_block_ends:
            _check_room_for_blocks(kv.scheduler_block_size, config)
        self.kv = kv
        self.config = config
        self.waiting = make_queue(config.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.stats = PrefixCacheStats()
        """Each admission once, unlike the cache manager's own, which count every look-up."""
        self.num_preemptions = 0

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Queue `request`; a `ValueError` if it is too long ever to be computed, or its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use: give each request its own")
        if request.num_tokens >= self.kv.max_model_len:
            raise ValueError(
                f"the prompt has {request.num_tokens} tokens, but prompt and output together may have "
                f"{self.kv.max_model_len}: shorten it, or raise max_model_len"
            )
        most = self.config.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and request.num_tokens > most:
            raise ValueError(
                f"the prompt has {request.num_tokens} tokens and is computed in one step, which may have {most}: "
                "shorten it, or raise max_num_batched_tokens"
            )
        if reason := self._never_fits(request):
            raise ValueError(reason)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End `request`: its blocks are given back, those with a name staying findable. Twice is once."""
        if self.requests.get(request.request_id) is not request:
            return
        del self.requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.free(request)
        else:
            self.waiting.remove(request)
        request.status = status

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # One step

    def schedule(self) -> StepPlan:
        """Plan a step: requests that run come first, then those that wait, unless running ones lacked blocks."""
        self.kv.new_step_starts()
        plan = StepPlan(self.config.max_num_batched_tokens)
        if not self._schedule_decodes(plan):
            self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        return plan

    def plan_of_decodes(self) -> StepPlan | None:
        """One token for each running request, without blocks for it, if that is all that there is to do."""
        if self.waiting or not self.running:
            return None
        plan = StepPlan(self.config.max_num_batched_tokens)
        for request in self.running:
            if request.num_tokens != request.num_computed_tokens + 1:
                return None
            plan.add(request, 1)
        return plan if plan.budget >= 0 else None

    def commit(self, plan: StepPlan) -> None:
        """The planned step was computed."""
        for entry in plan.scheduled:
            entry.request.num_computed_tokens = entry.stop

    def abandon(self, plan: StepPlan, reason: str) -> None:
        """The planned step failed: what it would have written is not findable, and its requests end in error."""
        for entry in plan.scheduled:
            self.kv.uncache(entry.request, entry.start)
        for entry in plan.scheduled:
            entry.request.error = reason
            self.finish(entry.request, RequestStatus.FINISHED_ERROR)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away; it resumes from whatever of them is still cached then."""
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(request)

    def preempt_all(self) -> None:
        """Preempt every running request; they keep their order."""
        for request in reversed(list(self.running)):
            self.preempt(request)

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached content. While requests run: `False`, or preempt them, to be computed again."""
        if reset_running:
            self.preempt_all()
        return self.kv.reset_prefix_cache()

    def describe(self) -> str:
        """Who runs, who waits, and what is free: for a message about a run that is stuck."""
        waiting = list(self.waiting)
        return (
            f"{len(self.running)} running {self.running[:4]}, {len(waiting)} waiting {waiting[:4]}, "
            f"{self.kv.pool.num_free} of {self.kv.num_usable} blocks free"
        )

    def _schedule_decodes(self, plan: StepPlan) -> bool:
        """Plan one token for each running request, all together. `False`, nothing done, if there is more to do.

        Most requests need nothing at most steps (`Request.quiet_until`); the others get their blocks together.
        """
        if len(self.running) > plan.budget:
            return False
        scheduled, due = [], []
        for request in self.running:
            start, stop = request.num_computed_tokens, len(request.all_token_ids)
            if stop != start + 1:
                return False
            scheduled.append(ScheduledTokens(request, start, stop))
            if stop > request.quiet_until:
                due.append(request)
        if due and not self.kv.allocate_decodes(due):
            return False
        plan.scheduled = scheduled
        plan.budget -= len(scheduled)
        return True

    def _schedule_running(self, plan: StepPlan) -> None:
        for request in list(self.running):
            if plan.budget == 0:
                return
            num_tokens = self._chunk(request, request.num_computed_tokens, plan)
            if num_tokens == 0 or request.status is not RequestStatus.RUNNING:
                continue
            while self.kv.allocate_slots(request, num_tokens) is None:
                victim = self._victim()
                plan.remove(victim)
                self.kv.uncache(victim, victim.num_computed_tokens)
                self.preempt(victim)
                plan.preempted.append(victim)
                if victim is request:
                    return
            plan.add(request, num_tokens)

    def _victim(self) -> Request:
        """Whom to preempt: the least important, or the one that came last."""
        return max(self.running) if self.config.policy == "priority" else self.running[-1]

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while self.waiting and plan.budget and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if request.status is RequestStatus.PREEMPTED and self._never_fits(request):
                self._refuse(request, plan)
                continue
            hits, num_hits = self.kv.get_computed_blocks(request)
            if not self.config.enable_chunked_prefill and self._waits_for_budget(request, num_hits, plan):
                return
            num_tokens = self._chunk(request, num_hits, plan)
            if num_tokens == 0:
                return
            blocks = self.kv.allocate_slots(
                request,
                num_tokens,
                num_hits,
                hits,
                full_sequence_must_fit=self.config.reserve_full_sequence,
                has_scheduled_reqs=bool(self.running),
            )
            if blocks is None:
                if self.running:
                    return
                self._refuse(request, plan)
                continue
            self.waiting.pop()
            self._admit(request, num_hits, plan)
            plan.add(request, num_tokens)

    def _admit(self, request: Request, num_hits: int, plan: StepPlan) -> None:
        if self.kv.enable_caching and not request.get_skip_reading_prefix_cache():
            self.stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)
            self.kv.observe_admission(request, num_hits)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_hits
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_found_tokens = num_hits
        self.running.append(request)
        plan.admitted.append(request)

    def _refuse(self, request: Request, plan: StepPlan) -> None:
        """Nobody else holds a block, and yet it does not fit: it never will."""
        request.error = self._never_fits(request) or f"{request!r} does not fit into an empty pool"
        self.finish(request, RequestStatus.FINISHED_ERROR)
        plan.refused.append(request)

    def _never_fits(self, request: Request) -> str | None:
        """Why the whole pool would not be enough for `request`, if so."""
        need = self.kv.blocks_for(request.num_tokens)
        usable = self.kv.num_usable
        if need <= usable:
            return None
        return (
            f"{request.num_tokens} tokens need {need} blocks, but the pool has {usable} usable ones: "
            "shorten the request, or raise CacheConfig.num_blocks"
        )

    def _waits_for_budget(self, request: Request, num_hits: int, plan: StepPlan) -> bool:
        """Whether a later step has room for all of `request` at once, and this one has not."""
        num_tokens = request.num_tokens - num_hits
        return num_tokens > plan.budget and plan.budget < self.config.max_num_batched_tokens

    def _chunk(self, request: Request, start: int, plan: StepPlan) -> int:
        """How many of `request`'s tokens from `start` on this step may compute."""
        limit = self.config.long_prefill_token_threshold or request.num_tokens
        num_tokens = min(request.num_tokens - start, plan.budget, limit)
        if self.kv.states_at_block_ends:
            return _end_at_a_block(start, num_tokens, request.num_tokens, self.kv.scheduler_block_size)
        return num_tokens


def _check_room_for_blocks(block_size: int, config: SchedulerConfig) -> None:
    """A `ValueError` unless a step has room for a whole block of a prompt, however many requests generate."""
    least = block_size + config.max_num_seqs - 1
    if config.max_num_batched_tokens < least:
        raise ValueError(
            f"a model with recurrent layers is computed in whole blocks of {block_size} tokens, beside up to "
            f"{config.max_num_seqs - 1} requests that generate: raise SchedulerConfig.max_num_batched_tokens from "
            f"{config.max_num_batched_tokens} to {least}, or lower max_num_seqs"
        )
    if 0 < config.long_prefill_token_threshold < block_size:
        raise ValueError(
            f"a model with recurrent layers is computed in whole blocks of {block_size} tokens: raise "
            f"SchedulerConfig.long_prefill_token_threshold from {config.long_prefill_token_threshold} to that"
        )


def _end_at_a_block(start: int, num_tokens: int, length: int, block_size: int) -> int:
    """`num_tokens`, cut so that the last state of every full block is one that a step ends with.

    A recurrent layer keeps only the state at the end of a step. So steps over known tokens end where a block does;
    what is left after the last full block, and each token generated, is a step of its own.
    """
    stop = start + num_tokens
    last = length // block_size * block_size
    if start < last:
        stop = min(stop, last) // block_size * block_size
    return max(0, stop - start)

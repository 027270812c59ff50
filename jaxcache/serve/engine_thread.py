"""The engine in a thread of its own: requests go in and deltas come out through queues, nobody else touches it."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jaxcache.core.observer import CacheObserver
from jaxcache.engine import Delta, Engine, PoolingParams, RequestOutput, SamplingParams
from jaxcache.serve.kv_publisher import KVEventPublisher
from jaxcache.serve.metrics import Metrics

logger = logging.getLogger(__name__)

RECENT_REQUESTS = 40


class EngineStopped(RuntimeError):
    """The engine takes no more requests."""


class StepFailed(RuntimeError):
    """The step that a request was part of failed; the engine goes on."""


@dataclass
class _Open:
    """One request of a client: where its deltas go."""

    loop: asyncio.AbstractEventLoop
    deltas: asyncio.Queue[Delta | Exception]
    last_token_times: dict[int, float] = field(default_factory=dict)
    """By answer, of those to one prompt that have begun."""
    num_ended: int = 0
    """Of the answers to one prompt."""


@dataclass
class Snapshot:
    """The engine's state after a step, for those who may not touch it."""

    stats: dict[str, float]
    missed_tokens: dict[str, int] = field(default_factory=dict)
    num_named_blocks: int = 0
    """Contents that can be found, held or not."""
    adapters: tuple[str, ...] = ()
    """The names of those that are loaded."""


class EngineThread:
    """Owns an engine from `start` to `stop`. All methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        metrics: Metrics | None = None,
        publisher: KVEventPublisher | None = None,
        sample: float = 0.01,
    ) -> None:
        self.engine = engine
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_REQUESTS)
        """What the latest finished requests took from the cache, newest last."""
        self._metrics = metrics
        self._publisher = publisher
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._stopping = self._closed = False
        self._closing = threading.Lock()
        self._observer = CacheObserver(engine.core.kv.pool.num_blocks, sample)
        engine.core.kv.observer = self._observer
        self.snapshot = self._take_snapshot()
        self._thread = threading.Thread(target=self._run, name="jaxcache-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Abort what runs, and wait for the thread to end."""
        self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` between two steps; its result, or what it raised."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._closing:
            if self._stopping or self._closed:
                raise EngineStopped("the engine has stopped")
            self._commands.put(run)
        return await asyncio.wrap_future(future)

    async def stream(
        self,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Delta]:
        """The deltas of one request; leaving early aborts it. A `ValueError` for one that cannot be served."""
        entry = _Open(asyncio.get_running_loop(), asyncio.Queue())

        def add() -> str:
            request_id = self.engine.add_request(
                prompt, params, adapter=adapter, cache_salt=cache_salt, priority=priority
            )
            self._open[request_id] = entry
            return request_id

        adding = asyncio.ensure_future(self.call(add))
        try:
            request_id = await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(self._abort_late)
            raise
        try:
            num_ended = 0
            while True:
                delta = await entry.deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                num_ended += delta.finish_reason is not None
                yield delta
                if num_ended == len(delta.output.completions):
                    return
        finally:
            self._commands.put(lambda: self._abort(request_id))

    def _abort_late(self, adding: "asyncio.Future[str]") -> None:
        if not adding.cancelled() and adding.exception() is None:
            request_id = adding.result()
            self._commands.put(lambda: self._abort(request_id))

    # In the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if self.engine.has_unfinished and not self._stopping:
                    self._step()
        finally:
            self._close()

    def _close(self) -> None:
        """Nobody waits for an answer that will not come."""
        with self._closing:
            self._closed = True
        while not self._commands.empty():
            self._commands.get()()
        for request_id in list(self._open):
            self._fail(request_id, EngineStopped("the engine has stopped"))
        self._after_step()

    def _obey(self) -> None:
        """Run what was asked for; wait for it if there is nothing else to do."""
        idle = not self.engine.has_unfinished
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            idle = False
            command()
            self._after_step()

    def _step(self) -> None:
        try:
            deltas = self.engine.step()
        except (RuntimeError, ValueError, ArithmeticError, MemoryError) as error:
            logger.exception("a step failed")
            ended = [request_id for request_id in self._open if not self.engine.is_active(request_id)]
            # A failure that ended nobody would come again with the next step.
            for request_id in ended or list(self._open):
                self._fail(request_id, StepFailed(f"the step failed: {error}"))
        else:
            for delta in deltas:
                self._deliver(delta)
        self._after_step()

    def _deliver(self, delta: Delta) -> None:
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        now = time.perf_counter()
        if self._metrics is not None:
            if not entry.last_token_times:
                self._metrics.observe_first(delta.output)
            self._metrics.observe_delta(delta, now, entry.last_token_times.get(delta.index))
        entry.last_token_times[delta.index] = now
        entry.num_ended += delta.finish_reason is not None
        if entry.num_ended == len(delta.output.completions):
            del self._open[delta.request_id]
            self._remember(delta.output)
        self._send(entry, delta)

    def _send(self, entry: _Open, item: Delta | Exception) -> None:
        if not entry.loop.is_closed():
            entry.loop.call_soon_threadsafe(entry.deltas.put_nowait, item)

    def _abort(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None and self.engine.is_active(request_id):
            self.engine.abort(request_id)
            if self._metrics is not None:
                self._metrics.observe_end("abort")

    def _fail(self, request_id: str, error: Exception) -> None:
        entry = self._open.pop(request_id)
        self.engine.abort(request_id)
        if self._metrics is not None:
            self._metrics.observe_end("error")
        self._send(entry, error)

    def _remember(self, output: RequestOutput) -> None:
        self.recent.append(
            {
                "id": output.request_id,
                "prompt_tokens": output.num_prompt_tokens,
                "cached_tokens": output.num_cached_tokens,
                "output_tokens": sum(len(c.token_ids) for c in output.completions),
                "time_to_first_token": output.time_to_first_token,
                "latency": output.latency,
            }
        )

    def _after_step(self) -> None:
        self.snapshot = self._take_snapshot()
        if self._metrics is not None:
            self._metrics.observe_blocks(self._observer.take_times())
        events = self.engine.core.kv.take_events()
        if events and self._publisher is not None:
            self._publisher.publish(events)

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(
            self.engine.stats(),
            {**self._observer.missed_tokens},
            len(self.engine.core.kv.index),
            tuple(adapter.name for adapter in self.engine.adapters),
        )

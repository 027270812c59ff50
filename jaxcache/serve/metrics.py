"""Prometheus metrics, named as in the field with the prefix `jaxcache:`."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from jaxcache.core.observer import BlockTimes
from jaxcache.engine import Delta, RequestOutput

if TYPE_CHECKING:
    from jaxcache.serve.engine_thread import Snapshot

PREFIX = "jaxcache:"
_FAST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_SLOW = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_LIVES = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600)


class Metrics:
    """Histograms are told what happens; counters and gauges are read from the engine's snapshot when asked for."""

    def __init__(self, model: str, snapshot: Callable[[], "Snapshot"]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_SnapshotCollector(model, snapshot))
        self._labels = {"model_name": model}
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FAST)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens of an answer.", _FAST)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _SLOW)
        self._lifetime = self._histogram("kv_block_lifetime_seconds", "From allocation to eviction.", _LIVES)
        self._idle = self._histogram("kv_block_idle_before_evict_seconds", "From last use to eviction.", _LIVES)
        self._gap = self._histogram("kv_block_reuse_gap_seconds", "Between two uses of a block.", _LIVES)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts that got a first token.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._ended = Counter(
            f"{PREFIX}request_success",
            "Answers that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )

    def observe_first(self, output: RequestOutput) -> None:
        """A request has its first token, whichever answer that is of."""
        self._prompt.inc(output.num_prompt_tokens)
        if output.time_to_first_token is not None:
            self._ttft.observe(output.time_to_first_token)

    def observe_delta(self, delta: Delta, now: float, last_token_time: float | None) -> None:
        """`now` and `last_token_time` as `time.perf_counter` counts; the latter `None` before the first token."""
        if last_token_time is not None and delta.token_ids:
            self._itl.observe(now - last_token_time)
        self._generated.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            self.observe_end(delta.finish_reason)
            self._e2e.observe(now - delta.output.arrival_time)

    def observe_end(self, reason: str) -> None:
        self._ended.labels(finished_reason=reason, **self._labels).inc()

    def observe_blocks(self, times: BlockTimes) -> None:
        for histogram, values in (
            (self._lifetime, times.lifetimes),
            (self._idle, times.idle),
            (self._gap, times.reuse_gaps),
        ):
            for value in values:
                histogram.observe(value)

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(PREFIX + name, help_text, ("model_name",), buckets=buckets, registry=self.registry)
        return metric.labels(**self._labels)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(PREFIX + name, help_text, ("model_name",), registry=self.registry).labels(**self._labels)


class _SnapshotCollector(Collector):
    _COUNTERS = (
        ("prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
        ("prefix_cache_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
        ("num_preemptions", "num_preemptions", "Times that a request had to give its blocks back."),
        ("kv_cache_evicted_blocks", "num_evicted_blocks", "Cached blocks that were taken for other content."),
    )
    _GAUGES = (
        ("num_requests_running", "num_requests_running", "Requests that are being computed."),
        ("num_requests_waiting", "num_requests_waiting", "Requests that wait."),
        ("kv_cache_usage_perc", "kv_cache_usage", "Share of blocks that requests hold, 0 to 1."),
    )

    def __init__(self, model: str, snapshot: Callable[[], "Snapshot"]) -> None:
        self._model = [model]
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        for name, key, text in self._COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric(self._model, snapshot.stats[key])
            yield counter
        for name, key, text in self._GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric(self._model, snapshot.stats[key])
            yield gauge
        misses = CounterMetricFamily(
            PREFIX + "prefix_cache_missed_tokens",
            "Tokens looked up and not found: new ones, evicted ones, and the tail that no hit can cover.",
            labels=["model_name", "reason"],
        )
        for reason, tokens in snapshot.missed_tokens.items():
            misses.add_metric([*self._model, reason], tokens)
        yield misses

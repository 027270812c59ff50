"""Request traces replayed on the cache: hit rates by pool size and eviction policy, without a model."""

from jaxcache.replay.bound import clairvoyant_hits
from jaxcache.replay.run import ReplayResult, replay
from jaxcache.replay.sweep import sweep
from jaxcache.replay.trace import Trace, TraceRequest, read_trace

__all__ = ["ReplayResult", "Trace", "TraceRequest", "clairvoyant_hits", "read_trace", "replay", "sweep"]

"""Prefix caching for language-model inference in JAX."""

from jaxcache.core import pool
from jaxcache.core.config import CacheConfig, SchedulerConfig
from jaxcache.core.hashing import content_identifier
from jaxcache.engine.engine import Engine
from jaxcache.engine.inputs import Feature, PromptInputs
from jaxcache.engine.outputs import Completion, Delta, RequestOutput
from jaxcache.engine.pooling_params import PoolingParams
from jaxcache.engine.prefix_cache import CachedSequence, CacheFull, PrefixCache, init_kv
from jaxcache.engine.sampling_params import SamplingParams
from jaxcache.engine.session import Session
from jaxcache.engine.step_inputs import Buckets
from jaxcache.kernels.kv_write import write_kv
from jaxcache.kernels.layout import KVCache
from jaxcache.kernels.paged_attention import paged_attention
from jaxcache.kernels.step import StepInputs
from jaxcache.models.lora import LoRAAdapter, LoRAConfig

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "CacheConfig",
    "CacheFull",
    "CachedSequence",
    "Completion",
    "Delta",
    "Engine",
    "Feature",
    "KVCache",
    "LoRAAdapter",
    "LoRAConfig",
    "PoolingParams",
    "PrefixCache",
    "PromptInputs",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "Session",
    "StepInputs",
    "content_identifier",
    "init_kv",
    "paged_attention",
    "pool",
    "write_kv",
]

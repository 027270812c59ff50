"""The serving engine, and the pieces that one's own serving loop can use."""

from jaxcache.engine.core import EngineCore, TopLogprobs
from jaxcache.engine.engine import Engine
from jaxcache.engine.outputs import Completion, Delta, RequestOutput
from jaxcache.engine.pooling_params import PoolingParams
from jaxcache.engine.runner import ModelRunner
from jaxcache.engine.sampling_params import SamplingParams
from jaxcache.engine.step_inputs import Buckets

__all__ = [
    "Buckets",
    "Completion",
    "Delta",
    "Engine",
    "EngineCore",
    "ModelRunner",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "TopLogprobs",
]

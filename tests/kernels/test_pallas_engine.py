"""The engine with the Pallas kernels, interpreted: the same text as with XLA's."""

import functools

import numpy as np
import pytest

import jaxcache as jc
from jaxcache.kernels.dispatch import Gpu, Implementation
from tests.engine.test_families import BUCKETS, load
from tests.kernels.test_tpu import tpu

slow = pytest.mark.slow


@functools.cache
def generate(name: str, implementation: Implementation) -> list[list[int]]:
    """Prefill chunks and decodes mixed, a shared prefix, and with gpt-oss windows and sinks."""
    model, config = load(name)
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, config.vocab_size, 17).tolist()
    prompts = [prefix + rng.integers(0, config.vocab_size, size).tolist() for size in (1, 9)]
    engine = jc.Engine(
        model,
        config,
        cache=jc.CacheConfig(block_size=8, num_blocks=60),
        scheduler=jc.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96),
        buckets=BUCKETS,
        implementation=implementation,
    )
    outputs = engine.generate(prompts, jc.SamplingParams(temperature=0.0, max_tokens=4), progress=False)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=slow), "gpt_oss"])
@pytest.mark.parametrize(
    "implementation", [pytest.param(tpu(), marks=slow, id="tpu"), pytest.param(Gpu(interpret=True), id="gpu")]
)
def test_same_text(name, implementation):
    assert generate(name, implementation) == generate(name, None)

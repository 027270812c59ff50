"""Embeddings: the rules on which of them may start from cached blocks."""

import numpy as np
import pytest

from jaxcache import CacheConfig, SamplingParams, SchedulerConfig
from tests.engine.mock_model import make_engine

OPTIONS = {
    "cache": CacheConfig(block_size=4, num_blocks=48),
    "scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
}
PROMPTS = [list(range(25)), [*range(21), 60], [5], list(range(40, 73))]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_same_whether_cached_or_not_and_in_whatever_chunks(pooling):
    engine = make_engine(**OPTIONS)
    plain = make_engine(
        cache=CacheConfig(4, 60, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_batched_tokens=128),
    )
    expected = plain.embed(PROMPTS, pooling=pooling)
    assert expected.shape == (4, 32)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-5)
    for _ in range(2):
        np.testing.assert_allclose(engine.embed(PROMPTS, pooling=pooling), expected, atol=1e-5)
    hits = engine.stats()["prefix_cache_hits"]
    assert hits > 60 if pooling == "last" else hits == 0
    assert engine.core.kv.num_held == 0


def test_mean_pooling_leaves_blocks_for_others_to_find():
    engine = make_engine(**OPTIONS)
    vector = engine.embed(PROMPTS[0], pooling="mean", normalize=False)
    assert vector.shape == (1, 32)
    assert engine.generate(PROMPTS[0], SamplingParams(max_tokens=1))[0].num_cached_tokens == 24


def test_embeddings_and_answers_share_the_steps():
    engine = make_engine(**OPTIONS)
    name = engine.add_request(list(range(10)), SamplingParams(temperature=0.0, max_tokens=30))
    expected = make_engine(**OPTIONS).embed(PROMPTS)
    np.testing.assert_allclose(engine.embed(PROMPTS), expected, atol=1e-5)
    assert engine.is_active(name)


def test_bad_input():
    engine = make_engine(**OPTIONS)
    with pytest.raises(ValueError, match="pooling must be 'last' or 'mean', got 'max'"):
        engine.embed([1, 2], pooling="max")
    with pytest.raises(ValueError, match="token ids must lie in"):
        engine.embed([[1], [2, 500]])
    assert not engine.has_unfinished

"""Resets, other weights, cut sequences, requests that leave nothing behind, and runs that are stuck."""

import jax
import numpy as np
import pytest
from flax import nnx

import jaxcache as jc
from jaxcache.core.hashing import MultiModalFeature, get_request_block_hasher
from jaxcache.core.request import Request
from jaxcache.core.scheduler import StepPlan
from tests.engine.mock_model import MockConfig, MockModel, make_engine

GREEDY = jc.SamplingParams(temperature=0.0, max_tokens=12)
OPTIONS = {
    "cache": jc.CacheConfig(block_size=4, num_blocks=48),
    "scheduler": jc.SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
}


def finish(engine) -> dict[str, list[int]]:
    ended = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.finish_reason:
                ended[delta.request_id] = delta.output.token_ids
    assert engine.core.kv.num_held == 0
    engine.core.kv.check_invariants()
    return ended


def test_a_reset_while_requests_run_refuses_saying_who(caplog):
    engine = make_engine(**OPTIONS)
    name = engine.add_request(list(range(20)), GREEDY)
    engine.step()
    assert not engine.reset_prefix_cache()
    assert f"the prefix cache was not reset: 5 blocks are held by ['{name}/0']" in caplog.text
    assert len(engine.core.kv.index) == 5
    finish(engine)


def test_a_reset_may_start_the_running_ones_over():
    engine = make_engine(**OPTIONS)
    prompts = [list(range(20)), list(range(40, 55))]
    expected = [make_engine(**OPTIONS).generate(p, GREEDY)[0].token_ids for p in prompts]
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    for _ in range(4):
        engine.step()
    assert engine.reset_prefix_cache(reset_running=True)
    assert len(engine.core.kv.index) == 0
    assert [r.request_id for r in engine.core.scheduler.waiting] == [f"{i}/0" for i in ids]
    assert finish(engine) == dict(zip(ids, expected))
    assert engine.stats()["preempted_hits"] == 0


def test_other_weights_make_all_older_blocks_unreachable():
    config, prompt = MockConfig(), list(range(20))
    engine = make_engine(config, **OPTIONS)
    old = engine.generate(prompt, GREEDY)[0].token_ids
    other = nnx.state(MockModel(config, seed=1))
    running = engine.add_request(list(range(30, 50)), GREEDY)
    engine.step()
    engine.update_params(other)
    fresh = jc.Engine(MockModel(config, seed=1), config, **OPTIONS)
    expected = fresh.generate([prompt, list(range(30, 50))], GREEDY, progress=False)
    output = engine.generate(prompt, GREEDY)[0]
    assert (output.num_cached_tokens, output.token_ids) == (0, expected[0].token_ids)
    assert output.token_ids != old
    finish(engine)
    again = engine.add_request(list(range(30, 50)), GREEDY)
    assert finish(engine)[again] == expected[1].token_ids
    assert running != again
    wrong = jax.tree.map(lambda x: x[:1], other)
    with pytest.raises(ValueError, match=r"new params.*are float32\[1, .*but the model has float32\["):
        engine.update_params(wrong)
    with pytest.raises(ValueError, match="another tree than the model's"):
        engine.update_params({"a": 1})


def test_a_request_may_leave_nothing_behind():
    engine = make_engine(**OPTIONS)
    quiet = jc.SamplingParams(temperature=0.0, max_tokens=12, skip_writing_prefix_cache=True)
    outputs = [engine.generate(list(range(20)), p)[0] for p in (quiet, quiet, GREEDY, quiet)]
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 0, 16]
    assert len({tuple(o.token_ids) for o in outputs}) == 1
    assert len(engine.core.kv.index) == 7
    engine.core.kv.check_invariants()


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_what_a_request_of_low_retention_leaves_goes_before_anything_else(policy):
    """It can be found until there is need of room. What it found itself is kept as usual."""
    engine = make_engine(cache=jc.CacheConfig(block_size=4, num_blocks=41, eviction_policy=policy))
    one, low = (jc.SamplingParams(temperature=0.0, max_tokens=1, cache_retention=r) for r in ("default", "low"))
    important, shared = list(range(30)), list(range(40, 60))

    def cached(prompt, params=one):
        (output,) = engine.generate(prompt, params)
        engine.core.kv.check_invariants()
        return output.num_cached_tokens

    assert cached(important) == cached(shared) == 0
    assert cached(shared + list(range(70, 80)), low) == 20
    for nth in range(12):
        assert cached([nth, *range(3 * nth, 3 * nth + 60)], low) == 0
    assert cached(shared + list(range(70, 80)), low) == 20
    assert cached(shared + list(range(70, 80)), low) == 28
    assert cached(important) == 28


def test_a_block_that_another_request_still_holds_is_kept_as_that_one_has_it():
    engine = make_engine(cache=jc.CacheConfig(block_size=4, num_blocks=12))
    prompt = list(range(13))
    for retention, max_tokens in (("low", 2), ("default", 4)):
        params = jc.SamplingParams(temperature=0.0, max_tokens=max_tokens, cache_retention=retention)
        engine.add_request(prompt, params)
    finish(engine)
    assert engine.core.kv.pool.queue()[-3:].tolist() == [3, 2, 1]


def test_a_retention_of_none_leaves_nothing():
    engine = make_engine(**OPTIONS)
    params = jc.SamplingParams(temperature=0.0, max_tokens=12, cache_retention="none")
    assert [engine.generate(list(range(20)), params)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert len(engine.core.kv.index) == 0
    with pytest.raises(ValueError, match="cache_retention must be one of default, low, none, got 'high'"):
        jc.SamplingParams(cache_retention="high")
    with pytest.raises(ValueError, match="cache_retention must be one of default, low, none, got 1"):
        jc.PoolingParams(cache_retention=1)


def test_skipping_applies_to_every_chunk():
    engine = make_engine(**OPTIONS)
    prompt = list(np.random.default_rng(0).integers(0, 97, 80))
    engine.generate(prompt, GREEDY)
    skip = jc.SamplingParams(temperature=0.0, max_tokens=2, skip_reading_prefix_cache=True)
    before = engine.stats()["prefix_cache_queries"]
    assert engine.generate(prompt, skip)[0].num_cached_tokens == 0
    assert engine.stats()["prefix_cache_queries"] == before


def test_a_run_without_progress_ends_in_an_error_that_says_where_it_stands(monkeypatch):
    engine = make_engine(**OPTIONS)
    engine.add_request(list(range(20)), GREEDY)
    monkeypatch.setattr(engine.core.scheduler, "schedule", lambda: StepPlan(0))
    for _ in range(8):
        assert engine.step() == []
    with pytest.raises(
        RuntimeError, match=r"no progress in 9 steps: 0 running \[\], 1 waiting .*47 of 47 blocks free"
    ):
        engine.step()


def test_a_dropped_token_leaves_no_stale_hash():
    """[1, 2, 3] generates 99, which fills a block; the turn goes on without it, with 7 and 8."""
    cache = jc.PrefixCache(jc.CacheConfig(num_blocks=20, block_size=4))
    session = cache.open([1, 2, 3])
    cache.commit(session, 99)
    session.truncate(3)
    session.extend([7, 8])
    assert session.token_ids == [1, 2, 3, 7, 8]
    cache.step_inputs([session])
    cache.commit(session)
    with cache.open([1, 2, 3, 99, 5]) as other:
        assert other.num_cached_tokens == 0
    with cache.open([1, 2, 3, 7, 9]) as same:
        assert same.num_cached_tokens == 4
    cache.check_invariants()


def test_a_cut_sequence_does_not_write_into_a_block_that_has_a_name():
    cache = jc.PrefixCache(jc.CacheConfig(num_blocks=20, block_size=4))
    session = cache.open(range(10))
    cache.commit(session, 50)
    kept = session.block_ids
    session.truncate(6)
    assert (session.num_computed_tokens, session.block_ids) == (4, kept[:1])
    with cache.open(range(10)) as other:
        assert other.num_cached_tokens == 8
        step = cache.step_inputs([session])
        assert step.positions[:2].tolist() == [4, 5]
        assert session.block_ids[1] not in other.block_ids
    cache.commit(session, 60)
    cache.check_invariants()
    session.truncate(4)
    assert (session.num_computed_tokens, len(session.block_ids)) == (4, 1)
    with pytest.raises(ValueError, match="cannot keep 9 of 4 tokens"):
        session.truncate(9)
    with pytest.raises(ValueError, match="100 more tokens make 104, but a sequence may have 76"):
        session.extend(range(100))


def test_hashes_follow_when_tokens_are_dropped():
    hasher = get_request_block_hasher(4, "sha256", "0")
    features = [MultiModalFeature("a", 2, 4)]
    request = Request("r", range(14), features=features, block_hasher=hasher)
    request.truncate(9)
    assert len(request.block_hashes) == 2
    request.append_output_token_ids([90, 91, 92])
    same = Request("s", [*range(9), 90, 91, 92], features=features, block_hasher=hasher)
    assert request.block_hashes == same.block_hashes


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([("", 0, 2)], "feature 0 needs an identifier derived from its content, got ''"),
        ([(None, 0, 2)], "feature 0 needs an identifier"),
        ([("a", 0)], r"feature 0 must be \(identifier, offset, length\) with integers of tokens, got \('a', 0\)"),
        ([("a", 1.5, 2)], r"feature 0 must be \(identifier, offset, length\)"),
        ([("a", 0, 0)], r"feature 0 \('a'\) covers tokens \[0, 0\), but the prompt has \[0, 8\)"),
        ([("a", 6, 3)], r"covers tokens \[6, 9\), but the prompt has \[0, 8\)"),
        ([("a", -1, 3)], r"covers tokens \[-1, 2\)"),
        ([("a", 0, 4), ("b", 3, 2)], r"feature 1 \('b'\) begins at token 3, but the one before ends at 4"),
        ([("a", 4, 2), ("b", 0, 2)], "sort features by offset, and let them not overlap"),
    ],
)
def test_inconsistent_features_are_refused(features, message):
    with pytest.raises(ValueError, match=message):
        Request("r", range(8), features=features)

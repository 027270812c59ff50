"""Faults that other caches of this kind have had, looked for in the whole engine."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcache as jc
from jaxcache.core import hashing
from tests.engine.mock_model import make_engine

GREEDY = jc.SamplingParams(temperature=0.0, max_tokens=6)
SCHEDULER = jc.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)


def ask(engine, prompt, params=GREEDY):
    (output,) = engine.generate(prompt, params)
    engine.core.kv.check_invariants()
    return output


def cold(prompt):
    return ask(make_engine(cache=jc.CacheConfig(4, 48, enable_prefix_caching=False)), prompt).token_ids


def test_answers_do_not_rest_on_the_hash(monkeypatch):
    """Were all fingerprints equal, hits would be rarer, and answers the same."""
    monkeypatch.setitem(hashing.HASH_FUNCTIONS, "sha256", lambda value: bytes(32))
    engine = make_engine(cache=jc.CacheConfig(4, 20), scheduler=SCHEDULER)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, rng.integers(5, 20)).tolist() for _ in range(8)]
    expected = [cold(prompt) for prompt in prompts]
    for _ in range(2):
        outputs = engine.generate(prompts, GREEDY, progress=False)
        assert [output.token_ids for output in outputs] == expected
        engine.core.kv.check_invariants()
    again = ask(engine, prompts[-1])
    assert (again.token_ids, again.num_cached_tokens > 0) == (expected[-1], True)


def test_a_prompt_aborted_between_its_chunks():
    """Its blocks go to others, and what it had finished is either found whole or not at all."""
    engine = make_engine(cache=jc.CacheConfig(4, 12), scheduler=SCHEDULER)
    prompt = list(range(24))
    name = engine.add_request(prompt, GREEDY)
    for _ in range(2):
        engine.step()
    engine.abort(name)
    engine.core.kv.check_invariants()
    found = ask(engine, prompt)
    assert (found.num_cached_tokens, found.token_ids) == (16, cold(prompt))
    others = [[nth] * 21 for nth in range(50, 53)]
    assert [ask(engine, other).token_ids for other in others] == [cold(other) for other in others]
    assert ask(engine, prompt).token_ids == cold(prompt)


@pytest.mark.parametrize(("size", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_of_a_prompt_that_is_all_there_is_computed(size, cached):
    engine = make_engine(cache=jc.CacheConfig(4, 48), scheduler=SCHEDULER)
    ask(engine, list(range(40)))
    output = ask(engine, list(range(size)))
    assert (output.num_cached_tokens, output.token_ids) == (cached, cold(list(range(size))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_narrow_kv_is_the_same_from_the_cache(dtype):
    """Bit for bit, where a cold run is cut at the same tokens; scales are kept with their blocks."""
    engine = make_engine(cache=jc.CacheConfig(4, 48, kv_cache_dtype=dtype), scheduler=SCHEDULER)
    params = jc.SamplingParams(temperature=0.0, max_tokens=6, logprobs=5)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    first, second = (ask(engine, prompt, params) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.completions[0].logprobs == second.completions[0].logprobs
    assert engine.runner.kv.data.dtype == jnp.dtype(dtype)


def test_a_request_that_waits_finds_what_is_there_when_it_is_admitted():
    """Not what was there when it came: of the two blocks that it would have had one is gone by then."""
    engine = make_engine(
        cache=jc.CacheConfig(4, 12), scheduler=jc.SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=32)
    )
    prompt = list(range(12))
    ask(engine, prompt)
    blocker = engine.add_request([60] * 30, jc.SamplingParams(temperature=0.0, max_tokens=10))
    waiting = engine.add_request(prompt, GREEDY)
    ended = {}
    while engine.has_unfinished:
        ended |= {delta.request_id: delta.output for delta in engine.step() if delta.finish_reason}
    assert ended[waiting].num_cached_tokens == 4
    assert ended[waiting].token_ids == cold(prompt)
    assert ended[blocker].finish_reason == "length"


def test_tokens_out_of_range_never_share_a_block():
    engine = make_engine(cache=jc.CacheConfig(4, 48))
    expected = ask(engine, [7] * 9).token_ids
    for bad in (-1, 2**31, 2**32 + 7):
        with pytest.raises(ValueError, match=f"prompt token 4 is {bad}"):
            engine.generate([7] * 4 + [bad] + [7] * 4, GREEDY)
    output = ask(engine, np.full(9, 7, np.uint8))
    assert (output.token_ids, output.num_cached_tokens) == (expected, 8)


def test_every_path_to_a_block_may_evict():
    """A pool full of cached blocks that nobody holds serves prompts, generation and several answers alike."""
    engine = make_engine(cache=jc.CacheConfig(4, 12), scheduler=SCHEDULER)
    for nth in range(4):
        ask(engine, [nth] * 11)
    assert engine.core.kv.pool.named().sum() == 11
    long = jc.SamplingParams(temperature=0.0, max_tokens=30)
    assert len(ask(engine, [9], long).token_ids) == 30
    several = jc.SamplingParams(temperature=1.0, max_tokens=6, n=3, seed=1)
    assert [len(one.token_ids) for one in ask(engine, list(range(10)), several).completions] == [6] * 3
    assert engine.core.kv.num_held == 0

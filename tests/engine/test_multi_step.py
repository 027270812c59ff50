"""Several decode steps per device call: the same tokens and the same blocks as step by step."""

import jax
import numpy as np
import pytest

from jaxcache import CacheConfig, SamplingParams, SchedulerConfig
from jaxcache.engine import runner as runner_module
from tests.engine.mock_model import make_engine
from tests.engine.test_engine import idle, shared_prefix_prompts


def engine_of(decode_steps, num_blocks=60, **cache):
    return make_engine(
        cache=CacheConfig(block_size=4, num_blocks=num_blocks, **cache),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, decode_steps=decode_steps),
    )


def random_params(rng):
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.8])),
        top_p=0.9,
        seed=int(rng.integers(1000)),
        max_tokens=int(rng.integers(1, 40)),
        stop_token_ids=[int(rng.integers(97))],
        min_tokens=int(rng.integers(2)),
    )


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"eviction_policy": "s3fifo"}])
@pytest.mark.parametrize("seed", [0])
def test_tokens_and_blocks_are_those_of_single_steps(seed, options):
    """Random ends, pressure and preemption; at the end even the eviction order is the same."""
    rng = np.random.default_rng(seed)
    ahead, single = engine_of(5, 30, **options), engine_of(1, 30, **options)
    calls = {"steps": 0}
    run_steps = ahead.runner.run_steps

    def counted(*arguments):
        tokens, *rest = run_steps(*arguments)
        calls["steps"] += len(tokens)
        return tokens, *rest

    ahead.runner.run_steps = counted
    for _ in range(3):
        prompts = shared_prefix_prompts(rng, 6)
        params = [random_params(rng) for _ in prompts]
        answers = [engine.generate(prompts, params, progress=False) for engine in (ahead, single)]
        for mine, theirs in zip(*answers):
            assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert ahead.core.kv.pool.queue().tolist() == single.core.kv.pool.queue().tolist()
        assert ahead.core.kv.pool.named().tolist() == single.core.kv.pool.named().tolist()
    assert ahead.stats() == single.stats()
    assert calls["steps"] > 30
    idle(ahead)


def test_generated_blocks_are_found_afterwards():
    engine = engine_of(8)
    first = engine.generate(list(range(10)), SamplingParams(temperature=0.0, max_tokens=20))[0]
    again = engine.generate([*range(10), *first.token_ids], SamplingParams(temperature=0.0, max_tokens=2))[0]
    assert again.num_cached_tokens == 28


def test_what_somebody_must_look_at_is_generated_step_by_step():
    engine = engine_of(8)
    engine.runner.run_steps = None  # whoever calls it fails
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    assert len(engine.generate(list(range(10)), params)[0].token_ids) == 6
    many = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=list(range(50, 59)))
    engine.generate(list(range(10)), many)


def test_a_request_that_comes_meanwhile_is_admitted_at_the_next_step():
    engine = engine_of(4)
    engine.add_request(list(range(10)), SamplingParams(temperature=0.0, max_tokens=40))
    for _ in range(3):
        engine.step()
    engine.add_request(list(range(5)), SamplingParams(temperature=0.0, max_tokens=3))
    engine.step()
    assert len(engine.core.scheduler.running) == 2


def test_a_failed_call_loses_its_requests_alone(monkeypatch):
    engine = engine_of(4)
    engine.add_request(list(range(10)), SamplingParams(temperature=0.0, max_tokens=40))
    engine.step()

    def fail(*_, **__):
        raise RuntimeError("lost")

    with monkeypatch.context() as patched:
        patched.setattr(runner_module, "decode_steps", fail)
        with pytest.raises(RuntimeError, match="lost"):
            engine.step()
    assert (
        engine.generate(list(range(10)), SamplingParams(temperature=0.0, max_tokens=9))[0].num_cached_tokens == 8
    )
    assert [delta.finish_reason for delta in engine.step()] == ["error"]
    idle(engine)


def test_nothing_compiles_after_warmup():
    engine = engine_of(3)
    engine.warmup(progress=False)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    params = SamplingParams(temperature=0.0, max_tokens=12)
    engine.generate([list(range(n)) for n in (5, 9, 20)], params, progress=False)
    jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_bad_number_of_steps():
    with pytest.raises(ValueError, match=r"SchedulerConfig\.decode_steps must be an integer of at least 1, got 0"):
        SchedulerConfig(decode_steps=0)

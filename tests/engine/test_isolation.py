"""The operator's check tells an engine that isolates from one that does not."""

import pytest

from jaxcache import CacheConfig, SamplingParams
from jaxcache.core.request import Request
from jaxcache.engine.isolation import check_isolation
from tests.engine.mock_model import MockConfig, make_engine

CACHE = CacheConfig(block_size=4, num_blocks=48)


def test_an_engine_that_isolates():
    engine = make_engine(cache=CACHE)
    busy = engine.add_request(list(range(10)), SamplingParams(temperature=0.0, max_tokens=60))
    report = check_isolation(engine)
    assert report.isolated
    assert report.same_answers
    assert (report.num_prompt_tokens, report.same_salt) == (21, 20)
    assert engine.is_active(busy)


def test_an_engine_that_does_not(monkeypatch):
    """Were salts ignored, the check would say so."""
    monkeypatch.setattr(Request, "namespace", property(lambda self: ()))
    engine = make_engine(MockConfig(vocab_size=50), cache=CACHE)
    add = engine.core.add_request
    monkeypatch.setattr(engine.core, "add_request", lambda *a, cache_salt=None, **k: add(*a, **k))
    report = check_isolation(engine)
    assert not report.isolated
    assert report.other_salt == 20


@pytest.mark.parametrize("other", ["s2", None])
def test_what_a_probe_can_learn(other):
    """Scheduled tokens and cached_tokens are the side channel; with salts both are those of a cold run."""
    engine = make_engine(cache=CACHE)
    secret = list(range(30))
    engine.generate(secret, SamplingParams(temperature=0.0, max_tokens=1), cache_salt="s1")
    for guess in (secret, secret[:8] + [90] * 22):
        name = engine.add_request(guess, SamplingParams(temperature=0.0, max_tokens=1), cache_salt=other)
        plan = engine.core.scheduler.schedule()
        assert [entry.num_tokens for entry in plan.scheduled] == [30]
        engine.core.scheduler.abandon(plan, "only planned")
        assert engine.core.scheduler.requests == {}
        engine.abort(name)
    assert not engine.has_unfinished
    assert engine.core.kv.num_held == 0

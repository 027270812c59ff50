"""Sessions: turns find the turns before, and what was dropped is never found under another's name."""

import numpy as np
import pytest

import jaxcache as jc
from jaxcache.models.tokenizer import ByteTokenizer
from tests.engine.mock_model import MockConfig, MockModel, make_engine
from tests.engine.test_inputs import ROWS
from tests.engine.test_inputs import make_engine as make_llama

CACHE = jc.CacheConfig(block_size=4, num_blocks=48)
GREEDY = jc.SamplingParams(temperature=0.0, max_tokens=5)
ONE = jc.SamplingParams(temperature=0.0, max_tokens=1)


def alone(token_ids, params=GREEDY, **options):
    engine = make_engine(cache=jc.CacheConfig(4, 48, enable_prefix_caching=False), **options)
    return engine.generate(token_ids, params)[0].token_ids


def test_each_turn_finds_the_turns_before_it():
    engine = make_engine(cache=CACHE)
    session, said = engine.session(), []
    for turn in ([1, 2, 3], list(range(10)), [4], [50] * 9):
        output = session.ask(turn, GREEDY)
        known = len(said) - 1 if said else 0
        assert output.num_cached_tokens == known // 4 * 4
        assert output.token_ids == alone(said + turn)
        said += turn + output.token_ids
        assert session.token_ids == said
        assert engine.core.kv.num_held == 0


def test_a_dropped_answer_leaves_no_stale_hash():
    """[1, 2, 3] generates a token, which fills a block; the session goes on without it, with 7 and 8."""
    engine = make_engine(cache=CACHE)
    session = engine.session()
    (token,) = session.ask([1, 2, 3], ONE, keep_answer=False).token_ids
    assert session.ask([7, 8], ONE).num_cached_tokens == 0
    assert session.token_ids[:5] == [1, 2, 3, 7, 8]
    stale, fresh = (engine.generate([1, 2, 3, fourth, 5], GREEDY)[0] for fourth in (token, 7))
    assert (stale.num_cached_tokens, stale.token_ids) == (0, alone([1, 2, 3, token, 5]))
    assert (fresh.num_cached_tokens, fresh.token_ids) == (4, alone([1, 2, 3, 7, 5]))
    engine.core.kv.check_invariants()


def test_a_prompt_can_be_computed_ahead():
    engine = make_engine(cache=CACHE)
    session = engine.session()
    session.feed(range(20))
    assert session.token_ids == list(range(20))
    output = session.ask([30, 31], GREEDY)
    assert (output.num_cached_tokens, output.token_ids) == (20, alone([*range(20), 30, 31]))


def test_tokens_can_be_taken_back():
    engine = make_engine(cache=CACHE)
    session = engine.session()
    first = session.ask(range(10), GREEDY)
    session.truncate(9)
    output = session.ask([60, 61, 62], GREEDY)
    assert (output.num_cached_tokens, output.token_ids) == (8, alone([*range(9), 60, 61, 62]))
    assert engine.generate([*range(10), *first.token_ids], ONE)[0].num_cached_tokens == 12
    with pytest.raises(ValueError, match=r"cannot keep 18 tokens of Session\(17 tokens\)"):
        session.truncate(18)


def test_one_turn_at_a_time_beside_others():
    engine = make_engine(cache=CACHE)
    one, other = engine.session(), engine.session(cache_salt="s")
    ids = [session.add([1, 2, 3, 4, 5], GREEDY) for session in (one, other)]
    with pytest.raises(ValueError, match=f"the session's turn {ids[0]!r} has not ended: step until"):
        one.add([6], GREEDY)
    with pytest.raises(ValueError, match=r"cannot keep 0 tokens of Session\(0 tokens, turn"):
        one.truncate(0)
    while engine.has_unfinished:
        engine.step()
    assert one.token_ids == other.token_ids == [1, 2, 3, 4, 5, *alone([1, 2, 3, 4, 5])]
    assert one.ask([6], ONE).num_cached_tokens == 8
    assert engine.session().ask([*other.token_ids, 6], ONE).num_cached_tokens == 8
    assert engine.session(cache_salt="t").ask([*other.token_ids, 6], ONE).num_cached_tokens == 0


def test_an_aborted_turn_keeps_what_it_said_and_a_failed_one_never_was(monkeypatch):
    engine = make_engine(cache=CACHE)
    session = engine.session()
    for _ in session.stream([1, 2, 3], jc.SamplingParams(temperature=0.0, max_tokens=30)):
        if len(engine.output(session._turn.request_id).token_ids) == 2:
            break
    said = [1, 2, 3, *alone([1, 2, 3])[:2]]
    assert session.token_ids == said
    monkeypatch.setattr(engine.runner, "_call", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    with pytest.raises(RuntimeError, match="lost"):
        session.ask([9], GREEDY)
    monkeypatch.undo()
    assert session.token_ids == said
    assert session.ask([8], GREEDY).token_ids == alone([*said, 8])


def test_turns_of_text_join_as_they_are():
    engine = jc.Engine(
        MockModel(MockConfig(vocab_size=256)), MockConfig(vocab_size=256), ByteTokenizer(), cache=CACHE
    )
    session = engine.session()
    answer = session.ask("Once upon", ONE)
    session.ask(" a time", ONE)
    assert bytes(session.token_ids[:-1]) == b"Once upon" + bytes(answer.token_ids) + b" a time"


def test_features_of_earlier_turns_stay_where_they_were():
    engine, rest = make_llama(), list(range(12))
    session, features = engine.session(), []
    for nth in range(2):
        features.append(jc.Feature(len(session.token_ids) + 2, ROWS[nth, :6]))
        session.ask(jc.PromptInputs(rest, [jc.Feature(2, ROWS[nth, :6])]), GREEDY)
    whole = session.token_ids
    last = session.ask(rest, GREEDY)
    expected = make_llama(caching=False).generate(jc.PromptInputs([*whole, *rest], features), GREEDY)[0]
    assert last.token_ids == expected.token_ids
    assert last.num_cached_tokens == (len(whole) - 1) // 4 * 4
    session.truncate(8)
    output = session.ask(rest, GREEDY)
    assert output.num_cached_tokens == 8
    expected = make_llama(caching=False).generate(jc.PromptInputs([*whole[:8], *rest], features[:1]), GREEDY)[0]
    assert output.token_ids == expected.token_ids


def test_bad_turns():
    session = make_engine(cache=CACHE).session()
    with pytest.raises(ValueError, match="goes on behind one answer: a turn cannot have n = 2"):
        session.ask([1], jc.SamplingParams(n=2))
    with pytest.raises(ValueError, match="a session's turns are text, tokens, or tokens with features"):
        session.ask(jc.PromptInputs(embeds=np.ones((2, 8), np.float32)))
    with pytest.raises(ValueError, match="the prompt is empty"):
        session.ask([])
    with pytest.raises(ValueError, match="this engine has no tokenizer"):
        session.ask("text")
    with pytest.raises(ValueError, match="request 'x' has ended, or never was"):
        make_engine(cache=CACHE).output("x")
    assert session.token_ids == []

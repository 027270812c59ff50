"""The engine with a mock model: caching changes no answer, nothing is lost, nothing leaks."""

import gc

import jax
import numpy as np
import pytest

from jaxcache import Buckets, CacheConfig, Engine, SamplingParams, SchedulerConfig
from jaxcache.engine import runner as runner_module
from jaxcache.models.tokenizer import ByteTokenizer
from tests.engine.mock_model import MockConfig, MockModel, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SMALL = {
    "cache": CacheConfig(block_size=4, num_blocks=48),
    "scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
}
TEXT = MockConfig(vocab_size=257)


def uncached(options):
    return {**options, "cache": CacheConfig(options["cache"].block_size, 200, enable_prefix_caching=False)}


def idle(engine):
    """All blocks are free again and the bookkeeping agrees."""
    assert not engine.has_unfinished
    assert engine.core.kv.pool.num_free == engine.core.kv.pool.num_blocks - 1
    engine.core.kv.check_invariants()


def shared_prefix_prompts(rng, n, vocab=97):
    systems = [rng.integers(0, vocab, size).tolist() for size in (21, 33)]
    return [systems[rng.integers(2)] + rng.integers(0, vocab, rng.integers(1, 18)).tolist() for _ in range(n)]


@pytest.mark.parametrize("seed", range(3))
def test_caching_changes_no_answer_whatever_the_pressure(seed):
    """A small pool, chunked prefill, preemption, hits within a step and between batches."""
    rng = np.random.default_rng(seed)
    engine, plain = make_engine(**SMALL), make_engine(**uncached(SMALL))
    for _ in range(2):
        prompts = shared_prefix_prompts(rng, 14)
        got = engine.generate(prompts, GREEDY, progress=False)
        expected = plain.generate(prompts, GREEDY, progress=False)
        assert [o.token_ids for o in got] == [o.token_ids for o in expected]
        assert {o.finish_reason for o in got} == {"length"}
    stats = engine.stats()
    assert stats["prefix_cache_hits"] > 0.4 * stats["prefix_cache_queries"]
    assert stats["num_preemptions"] > 0
    assert plain.stats()["prefix_cache_queries"] == 0
    idle(engine)


def test_hits_are_reported_per_request():
    engine = make_engine(**SMALL)
    prompt = list(range(30))
    outputs = [engine.generate(prompt, GREEDY)[0] for _ in range(2)]
    assert [o.num_cached_tokens for o in outputs] == [0, 28]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].num_prompt_tokens == 30
    assert 0 < outputs[0].time_to_first_token <= outputs[0].latency
    assert engine.stats()["prefix_cache_hits"] == 28


def test_a_second_turn_hits_the_generated_tokens_too():
    engine = make_engine(**SMALL)
    first = engine.generate(list(range(9)), GREEDY)[0]
    history = first.prompt_token_ids + first.token_ids
    second = engine.generate([*history, 5, 6, 7], GREEDY)[0]
    assert second.num_cached_tokens == (len(history) - 1) // 4 * 4


def test_salts_separate_tenants():
    engine = make_engine(**SMALL)
    hits = [
        engine.generate(list(range(20)), GREEDY, cache_salt=salt)[0].num_cached_tokens
        for salt in ("a", "b", "a", None)
    ]
    assert hits == [0, 0, 16, 0]


def test_sampled_answers_depend_on_the_seed_alone():
    params = [SamplingParams(temperature=1.0, seed=nth, max_tokens=10) for nth in range(6)]
    prompts = shared_prefix_prompts(np.random.default_rng(7), 6)
    together = make_engine(**SMALL).generate(prompts, params, progress=False)
    alone = make_engine(**uncached(SMALL))
    assert [o.token_ids for o in together] == [alone.generate(p, q)[0].token_ids for p, q in zip(prompts, params)]
    assert len({tuple(o.token_ids) for o in together}) == 6


def test_several_answers_share_the_prompt():
    engine = make_engine(**SMALL)
    output = engine.generate(list(range(20)), SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=6))[0]
    assert [c.index for c in output.completions] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.completions}) == 3
    assert engine.stats()["prefix_cache_hits"] == 2 * 16
    again = make_engine(**SMALL).generate(list(range(20)), SamplingParams(temperature=1.0, seed=4, max_tokens=6))
    assert again[0].token_ids == output.completions[1].token_ids
    idle(engine)


def test_stop_ids_end_of_sequence_and_lengths():
    plain = make_engine(**SMALL).generate(list(range(10)), GREEDY)[0].token_ids
    stop = plain[4]
    at = plain.index(stop) + 1
    ended = make_engine(**SMALL, eos_token_ids=(stop,)).generate(list(range(10)), GREEDY)[0]
    assert (ended.token_ids, ended.finish_reason) == (plain[:at], "stop")
    assert ended.completions[0].stop_reason is None
    ended = make_engine(**SMALL).generate(
        list(range(10)), SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[stop])
    )[0]
    assert (ended.token_ids, ended.completions[0].stop_reason) == (plain[:at], stop)
    ignored = make_engine(**SMALL, eos_token_ids=(stop,)).generate(
        list(range(10)), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    )[0]
    assert ignored.token_ids == plain
    to_the_end = make_engine(
        cache=CacheConfig(4, 48), scheduler=SchedulerConfig(max_model_len=25, max_num_batched_tokens=32)
    ).generate(list(range(10)), SamplingParams(temperature=0.0, max_tokens=None))[0]
    assert (len(to_the_end.token_ids), to_the_end.finish_reason) == (15, "length")


def test_logprobs_are_those_of_the_logits():
    engine = make_engine(**SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    prompt = list(range(3, 22))
    for _ in range(2):
        output = engine.generate(prompt, params)[0]
        assert output.num_cached_tokens == 0
        positions = output.completions[0].logprobs
        assert [p.token_id for p in positions] == output.token_ids
        for position in positions:
            assert len(position.top) == 3
            assert position.top[0] == (position.token_id, position.logprob)
            assert position.top[0][1] >= position.top[1][1] >= position.top[2][1]
        assert output.prompt_logprobs[0] is None
        assert [p.token_id for p in output.prompt_logprobs[1:]] == prompt[1:]
    whole = prompt + output.token_ids
    again = engine.generate(whole, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
    scored = [p.logprob for p in again.prompt_logprobs[len(prompt) :]]
    np.testing.assert_allclose(scored, [p.logprob for p in positions], atol=1e-5)
    first = [p.logprob for p in output.prompt_logprobs[1:]]
    np.testing.assert_allclose(first, [p.logprob for p in again.prompt_logprobs[1 : len(prompt)]], atol=1e-5)


def test_prompt_logprobs_span_chunks():
    prompt = shared_prefix_prompts(np.random.default_rng(0), 1)[0] * 3
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    whole = make_engine(cache=CacheConfig(4, 60), scheduler=SchedulerConfig(max_num_batched_tokens=256))
    chunked = make_engine(cache=CacheConfig(4, 60), scheduler=SchedulerConfig(max_num_batched_tokens=16))
    a, b = (engine.generate(prompt, params)[0].prompt_logprobs[1:] for engine in (whole, chunked))
    assert len(a) == len(b) == len(prompt) - 1
    np.testing.assert_allclose([p.logprob for p in a], [p.logprob for p in b], atol=1e-5)


def test_streaming_gives_the_text_of_the_whole():
    engine = make_engine(TEXT, tokenizer=ByteTokenizer(), **SMALL)
    expected = engine.generate("hello there", GREEDY)[0]
    deltas = list(engine.stream("hello there", GREEDY))
    assert "".join(d.text for d in deltas) == expected.text
    assert [t for d in deltas for t in d.token_ids] == expected.token_ids
    assert [d.finish_reason for d in deltas] == [None] * 11 + ["length"]
    idle(engine)


def test_leaving_a_stream_gives_its_blocks_back():
    engine = make_engine(TEXT, tokenizer=ByteTokenizer(), **SMALL)
    stream = engine.stream("hello there", GREEDY)
    next(stream)
    stream.close()
    idle(engine)


def test_stop_strings_end_the_text_and_the_request():
    engine = make_engine(TEXT, tokenizer=ByteTokenizer(), **SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    text = engine.generate("some text", params)[0].text
    stop = text[6:9]
    cut = engine.generate("some text", SamplingParams(temperature=0.0, max_tokens=40, stop=stop))[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.completions[0].stop_reason) == ("stop", stop)
    kept = engine.generate(
        "some text", SamplingParams(temperature=0.0, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
    )[0]
    assert kept.text == text[: text.index(stop)] + stop
    streamed = "".join(
        d.text for d in engine.stream("some text", SamplingParams(temperature=0.0, max_tokens=40, stop=stop))
    )
    assert streamed == cut.text
    idle(engine)


def test_requests_can_be_added_and_aborted_between_steps():
    engine = make_engine(**SMALL)
    kept = engine.add_request(list(range(10)), GREEDY)
    gone = engine.add_request(list(range(40, 60)), GREEDY)
    engine.step()
    late = engine.add_request(list(range(10)), GREEDY, request_id="late")
    engine.abort(gone)
    engine.abort("never heard of")
    ended = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.finish_reason:
                ended[delta.request_id] = delta.output
    assert set(ended) == {kept, late}
    assert ended[late].num_cached_tokens == 8
    assert ended[kept].token_ids == ended[late].token_ids
    idle(engine)


def test_a_request_that_outgrows_the_pool_fails_alone():
    engine = make_engine(cache=CacheConfig(4, 9), scheduler=SchedulerConfig(max_num_batched_tokens=32))
    assert engine.max_model_len == 32
    outputs = engine.generate(
        [list(range(20)), list(range(5))], SamplingParams(temperature=0.0, max_tokens=100), progress=False
    )
    assert [o.finish_reason for o in outputs] == ["length", "length"]
    assert [o.num_prompt_tokens + len(o.token_ids) for o in outputs] == [32, 32]
    idle(engine)


def test_a_failing_step_is_reported_and_the_engine_goes_on(monkeypatch):
    engine = make_engine(**SMALL)
    expected = engine.generate(list(range(20)), GREEDY)[0].token_ids
    engine.reset_prefix_cache()
    waiting = [list(range(30, 60)) for _ in range(2)]
    real = runner_module._step

    def broken(graphdef, params, kv, *rest):
        for leaf in jax.tree.leaves(kv):
            leaf.delete()
        raise RuntimeError("device lost")

    for destroys_kv in (False, True):
        monkeypatch.setattr(
            runner_module,
            "_step",
            broken if destroys_kv else lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")),
        )
        with pytest.raises(RuntimeError, match="device lost"):
            engine.generate([list(range(20)), *waiting], GREEDY, progress=False)
        monkeypatch.setattr(runner_module, "_step", real)
        idle(engine)
        again = engine.generate(list(range(20)), GREEDY)[0]
        assert (again.token_ids, again.num_cached_tokens) == (expected, 0)
        engine.reset_prefix_cache()


def test_a_lost_kv_array_does_not_lose_the_requests_that_were_not_in_the_step(monkeypatch):
    engine = make_engine(
        cache=CacheConfig(4, 48), scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=4)
    )
    prompts = [[nth] * 9 for nth in range(3)]
    expected = [make_engine(**SMALL).generate(p, GREEDY)[0].token_ids for p in prompts]
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    engine.step()
    real = runner_module._step

    def broken(graphdef, params, kv, *rest):
        kv.data.delete()
        raise RuntimeError("device lost")

    monkeypatch.setattr(runner_module, "_step", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    monkeypatch.setattr(runner_module, "_step", real)
    ended = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.finish_reason:
                ended[delta.request_id] = (delta.finish_reason, delta.output.token_ids)
    assert ended == {ids[0]: ("error", []), ids[1]: ("length", expected[1]), ids[2]: ("length", expected[2])}
    idle(engine)


def test_a_step_that_fails_after_its_device_call_has_not_been(monkeypatch):
    """Log probabilities come from a call of their own."""
    engine = make_engine(**SMALL)
    asks = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)

    def broken(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "_logprobs", broken)
        asked, other = engine.add_request(list(range(20)), asks), engine.add_request([1, 2, 3], GREEDY)
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
        ended = {delta.request_id: delta.output for delta in engine.step()}
    assert {name: output.finish_reason for name, output in ended.items()} == {asked: "error", other: "error"}
    assert "device lost" in ended[asked].error
    idle(engine)
    again = engine.generate(list(range(20)), asks)[0]
    assert (again.num_cached_tokens, len(again.token_ids)) == (0, 4)


def test_a_kv_array_that_failed_later_than_its_call_is_made_anew(monkeypatch):
    """On an accelerator the call returns before the step has run: its arrays raise when they are waited for."""

    class Failed:
        def block_until_ready(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: device lost")

    engine = make_engine(**SMALL)
    expected = engine.generate(list(range(20)), GREEDY)[0].token_ids

    def broken(graphdef, params, kv, *rest):
        return kv._replace(data=Failed()), None, None

    def fetch(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: device lost")

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "_step", broken)
        patch.setattr(runner_module, "_sample", fetch)
        with pytest.raises(jax.errors.JaxRuntimeError, match="device lost"):
            engine.generate(list(range(20)), GREEDY)
    idle(engine)
    again = engine.generate(list(range(20)), GREEDY)[0]
    assert (again.token_ids, again.num_cached_tokens) == (expected, 0)


def test_nothing_compiles_after_warmup():
    buckets = Buckets((8, 16), (1, 4), tile_size=8)
    engine = make_engine(
        MockConfig(vocab_size=61),
        cache=CacheConfig(4, 24),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        buckets=buckets,
    )
    engine.warmup(progress=False)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, rng.integers(1, 40)).tolist() for _ in range(12)]
    params = [
        SamplingParams(temperature=t, top_k=3, max_tokens=9, logprobs=2, prompt_logprobs=p)
        for t, p in zip([0.0, 1.0] * 6, [None, 1, None] * 4)
    ]
    outputs = engine.generate(prompts, params, progress=False)
    assert engine.stats()["num_preemptions"] > 0
    engine.embed(prompts[:3])
    engine.abort(engine.add_request(prompts[0]))
    aborted = engine.add_request(prompts[1])
    engine.step()
    engine.abort(aborted)
    assert engine.reset_prefix_cache()
    engine.generate(prompts[0], GREEDY)
    jax.monitoring.clear_event_listeners()
    assert all(o.finish_reason == "length" for o in outputs)
    assert compiled == []


def test_kv_memory_is_what_the_blocks_take_and_held_once():
    config = MockConfig()
    engine = make_engine(config, cache=CacheConfig(block_size=8, num_blocks=50))
    block_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 8 * 4
    assert engine.stats()["kv_cache_bytes"] == 50 * block_bytes
    engine.generate(list(range(60)), GREEDY)
    gc.collect()
    arrays = [a for a in jax.live_arrays() if a.shape == engine.runner.kv.data.shape]
    assert len(arrays) == 1


def test_a_model_that_is_not_causal_turns_caching_off_and_says_so(caplog):
    engine = make_engine(MockConfig(causal=False), **SMALL)
    assert "prefix caching is off: this model's attention is not causal" in caplog.text
    assert [engine.generate(list(range(20)), GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_reset_is_refused_while_requests_run():
    engine = make_engine(**SMALL)
    engine.add_request(list(range(20)), GREEDY)
    engine.step()
    assert not engine.reset_prefix_cache()
    while engine.has_unfinished:
        engine.step()
    assert engine.reset_prefix_cache()
    assert engine.generate(list(range(20)), GREEDY)[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda e: e.generate([[1, 2], [3, 97]]),
            r"prompt 1: prompt token 1 is 97: token ids must lie in \[0, 97\)",
        ),
        (lambda e: e.generate([[1, 2], []]), "prompt 1: the prompt is empty"),
        (lambda e: e.generate([1, True]), "prompt 0: prompt token 1 is True"),
        (
            lambda e: e.generate([[0] * 188]),
            "prompt 0: the prompt has 188 tokens, but prompt and output together may have 188",
        ),
        (lambda e: e.generate([[1]], [SamplingParams()] * 2), "1 prompts need 1 or 1 SamplingParams, got 2"),
        (lambda e: e.generate("text"), "prompt 0: this engine has no tokenizer: give token ids instead of text"),
        (lambda e: e.add_request(5), "a prompt must be a string or a sequence of token ids, got int"),
        (
            lambda e: e.add_request([1], {"temperature": 0}),
            "params must be SamplingParams or PoolingParams, got dict",
        ),
        (lambda e: e.add_request([1], SamplingParams(stop="x")), "stop strings need a tokenizer"),
        (lambda e: e.add_request([1], cache_salt=3), "cache_salt must be a string, got 3"),
        (lambda e: e.add_request([1], cache_salt="a\ud800"), "cache_salt is no valid Unicode text: surrogates"),
        (lambda e: e.embed([]), "there are no prompts to embed"),
        (lambda e: e.add_request([1], priority="high"), "priority must be an integer, got 'high'"),
        (
            lambda e: e.add_request([1], SamplingParams(n=2), priority=True),
            "priority must be an integer, got True",
        ),
        (lambda e: SamplingParams(temperature=-0.1), "temperature must be"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_left_behind(call, message):
    engine = make_engine(**SMALL)
    with pytest.raises(ValueError, match=message):
        call(engine)
    idle(engine)
    assert not engine.core.scheduler.requests
    assert len(engine.generate([1, 2, 3], GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cache": CacheConfig(4, 9), "scheduler": SchedulerConfig(max_model_len=40)},
            "max_model_len 40 needs 10 blocks of 4 tokens, but the pool has 8 usable ones",
        ),
        ({"scheduler": SchedulerConfig(max_model_len=4000)}, "max_model_len 4000 is more than the 512 positions"),
        ({"cache": CacheConfig(kv_cache_dtype="float64")}, "KV dtype float64 is not supported"),
        (
            {"cache": CacheConfig(kv_cache_dtype="float9")},
            "KV dtype float9 is not supported: choose one of float32",
        ),
        ({"cache": CacheConfig(4, 9), "implementation": "cuda"}, "no implementation 'cuda'"),
        ({"cache": CacheConfig(4, 9), "implementation": "tpu"}, "'tpu' needs a TPU, but JAX computes on cpu"),
        (
            {"scheduler": SchedulerConfig(max_num_batched_tokens=64), "buckets": Buckets((32,), (64,))},
            "buckets of up to 32 tokens and 64 sequences do not hold steps of 64 tokens and 64 sequences",
        ),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**options)


def test_more_ends_than_can_be_held_back_are_refused_alone():
    engine = make_engine(**SMALL, eos_token_ids=range(12))
    with pytest.raises(ValueError, match="min_tokens can hold back 16 token ids, but 20 end this request"):
        engine.add_request([1], SamplingParams(min_tokens=1, stop_token_ids=range(20, 28)))
    assert engine.generate([1], SamplingParams(min_tokens=3, max_tokens=3))[0].finish_reason == "length"


@pytest.mark.parametrize("flag", ["enable_prefix_caching", "shared_prefix_attention", "check_steps"])
def test_flags_of_the_cache_are_bools(flag):
    with pytest.raises(ValueError, match=f"CacheConfig.{flag} must be True or False, got 'false'"):
        CacheConfig(**{flag: "false"})


@pytest.mark.parametrize("flag", ["enable_chunked_prefill", "reserve_full_sequence"])
def test_flags_of_the_scheduler_are_bools(flag):
    with pytest.raises(ValueError, match=f"SchedulerConfig.{flag} must be True or False, got 1"):
        SchedulerConfig(**{flag: 1})


def test_a_prompt_that_can_be_read_only_once_is_enough_for_several_answers():
    engine = make_engine(**SMALL)
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=6)
    (wanted,) = engine.generate([list(range(20))], params)
    engine.reset_prefix_cache()
    request_id = engine.add_request(iter(range(20)), params)
    output = engine.output(request_id)
    while engine.has_unfinished:
        engine.step()
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in wanted.completions]


def test_of_several_answers_all_begin_or_none(monkeypatch):
    """The second cannot be queued, for a reason that nobody foresaw: the first is taken back."""
    engine = make_engine(**SMALL)
    queue = engine.core.scheduler.add_request

    def only_first(request):
        if request.request_id.endswith("/1"):
            raise OSError("no more")
        queue(request)

    monkeypatch.setattr(engine.core.scheduler, "add_request", only_first)
    with pytest.raises(OSError, match="no more"):
        engine.add_request(list(range(20)), SamplingParams(n=3))
    idle(engine)
    assert not engine.core.scheduler.requests
    assert len(engine.generate([1, 2, 3], GREEDY)[0].token_ids) == 12


def test_without_caching_nothing_is_hashed_or_looked_up(monkeypatch):
    for config in (MockConfig(), MockConfig(causal=False)):
        engine = make_engine(config, **(uncached(SMALL) if config.causal else SMALL))
        assert engine.core._block_hasher is None
        for name in ("resident", "insert"):
            monkeypatch.setattr(engine.core.kv.index, name, None)
        assert len(engine.generate(list(range(20)), GREEDY)[0].token_ids) == 12


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="block_size"):
        Engine(MockModel(MockConfig()), MockConfig(), block_size=4)

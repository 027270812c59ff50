"""Embeddings: the rules on which of them may start from cached blocks."""

import numpy as np
import pytest

from jaxcache import CacheConfig, Engine, PoolingParams, SamplingParams, SchedulerConfig
from tests.engine.mock_model import make_engine
from tests.models.model_files import write_folder
from tests.models.test_families import golden_of

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


def run(engine):
    """Step until nothing is left; the outputs of requests that ended, by id."""
    ended = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.finish_reason is not None:
                ended[delta.request_id] = delta.output
        engine.core.kv.check_invariants()
    assert engine.core.kv.num_held == 0
    return ended


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_pooling_request_ends_in_one_delta_whose_output_has_the_embedding(pooling):
    engine = make_engine(**OPTIONS)
    expected = make_engine(**OPTIONS).embed(PROMPTS, pooling=pooling)
    for nth, again in [(0, False), (0, True), (1, False), (3, False)]:
        name = engine.add_request(PROMPTS[nth], PoolingParams(pooling=pooling))
        steps = []
        while engine.has_unfinished:
            steps += engine.step()
        (delta,) = steps
        assert (delta.request_id, delta.finish_reason, delta.text, delta.token_ids) == (name, "stop", "", ())
        assert delta.output.embedding.dtype == np.float32
        np.testing.assert_allclose(delta.output.embedding, expected[nth], atol=1e-5)
        assert delta.output.num_cached_tokens == (
            24 if again and pooling == "last" else 20 if nth == 1 and pooling == "last" else 0
        )
        assert delta.output.prompt_token_ids == PROMPTS[nth]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_same_with_preemption_in_the_middle_of_a_prompt(pooling):
    """All four begin, four tokens a step, and the pool has room for the whole of two."""
    scheduler = SchedulerConfig(
        max_num_batched_tokens=16, long_prefill_token_threshold=4, reserve_full_sequence=False
    )
    engine = make_engine(cache=CacheConfig(block_size=4, num_blocks=22), scheduler=scheduler)
    prompts = [list(range(first, first + 40)) for first in (0, 3, 40, 50)]
    expected = make_engine(**OPTIONS).embed(prompts, pooling=pooling, normalize=False)
    params = PoolingParams(pooling=pooling, normalize=False)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = run(engine)
    assert engine.stats()["num_preemptions"] > 0
    np.testing.assert_allclose([outputs[name].embedding for name in ids], expected, atol=1e-4)


def test_a_reset_in_the_middle_of_a_prompt_starts_the_sum_over():
    engine = make_engine(**OPTIONS)
    expected = make_engine(**OPTIONS).embed(PROMPTS[3], pooling="mean")
    name = engine.add_request(PROMPTS[3], PoolingParams(pooling="mean"))
    engine.step()
    assert engine.reset_prefix_cache(reset_running=True)
    np.testing.assert_allclose(run(engine)[name].embedding, expected[0], atol=1e-5)


def test_embeddings_and_answers_share_the_steps_and_nobodys_tokens_are_lost():
    """Steps that `embed` and `generate` run go on with other requests too; whoever steps next is told."""
    engine = make_engine(**OPTIONS)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    expected = make_engine(**OPTIONS).generate(list(range(10)), greedy)[0].token_ids
    name = engine.add_request(list(range(10)), greedy)
    np.testing.assert_allclose(engine.embed(PROMPTS), make_engine(**OPTIONS).embed(PROMPTS), atol=1e-5)
    assert engine.is_active(name)
    engine.generate(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=40))
    assert not engine.is_active(name)
    assert engine.has_unfinished
    with pytest.raises(ValueError, match="is in use: give each request its own"):
        engine.add_request([1], request_id=name)
    deltas = engine.step()
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert {delta.request_id for delta in deltas} == {name}
    assert [delta.finish_reason for delta in deltas][-2:] == [None, "length"]
    assert not engine.has_unfinished


def test_streams_may_take_turns():
    engine = make_engine(**OPTIONS)
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (20, 9)]
    expected = [make_engine(**OPTIONS).generate(p, one)[0].token_ids for p, one in zip(PROMPTS, params)]
    streams = [engine.stream(prompt, one) for prompt, one in zip(PROMPTS, params)]
    tokens = [[], []]
    for delta in streams[0]:
        tokens[0] += delta.token_ids
        for other in streams[1]:
            tokens[1] += other.token_ids
            break
        if len(tokens[0]) == 3:
            engine.generate(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=30))
    tokens[1] += [token for other in streams[1] for token in other.token_ids]
    assert tokens == expected
    assert not engine.has_unfinished


def test_a_failed_step_tells_those_it_was_not_run_for(monkeypatch):
    engine = make_engine(**OPTIONS)
    name = engine.add_request(list(range(10)), SamplingParams(temperature=0.0, max_tokens=12))
    engine.step()
    run_step = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.embed(PROMPTS[0])
    monkeypatch.setattr(engine.runner, "run", run_step)
    (delta,) = engine.step()
    assert (delta.request_id, delta.finish_reason) == (name, "error")
    assert "device lost" in delta.output.error
    assert not engine.has_unfinished


def test_an_aborted_request_is_not_spoken_of_again():
    engine = make_engine(**OPTIONS)
    name = engine.add_request(list(range(10)), SamplingParams(temperature=0.0, max_tokens=30))
    pooled = engine.add_request(PROMPTS[3], PoolingParams(pooling="mean"))
    engine.generate([5], SamplingParams(max_tokens=1))
    for request_id in (name, pooled):
        engine.abort(request_id)
    assert not engine.has_unfinished
    assert engine.core.kv.num_held == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_model_embeds_and_without_a_head_does_not_generate(tmp_path, tied):
    """As `AutoModel` and sentence-transformers save it: no `model.` in the names, and no lm_head."""
    golden = golden_of("qwen3")
    tensors = {name.removeprefix("model."): value for name, value in golden.tensors.items()}
    config = golden.hf_config | {"tie_word_embeddings": tied}
    folder = write_folder(tmp_path / "base", tensors, config=config)
    engine = Engine.from_pretrained(str(folder), **OPTIONS)
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7]]
    expected = Engine(golden.model(), golden.config, **OPTIONS).embed(prompts)
    np.testing.assert_array_equal(engine.embed(prompts), expected)
    if tied:
        assert len(engine.generate(prompts[0], SamplingParams(max_tokens=2))[0].token_ids) == 2
    else:
        with pytest.raises(ValueError, match=r"this model cannot generate: .* without a head \(lm_head\)"):
            engine.generate(prompts[0])
        assert not engine.has_unfinished


def test_bad_input():
    engine = make_engine(**OPTIONS)
    with pytest.raises(ValueError, match="pooling must be 'last' or 'mean', got 'max'"):
        engine.embed([1, 2], pooling="max")
    with pytest.raises(ValueError, match="token ids must lie in"):
        engine.embed([[1], [2, 500]])
    with pytest.raises(ValueError, match="normalize must be True or False, got 1"):
        PoolingParams(normalize=1)
    with pytest.raises(ValueError, match="params must be SamplingParams or PoolingParams, got dict"):
        engine.add_request([1], {"pooling": "last"})
    assert not engine.has_unfinished

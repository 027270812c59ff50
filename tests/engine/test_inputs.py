"""Features and prompt embeddings: they reach the model however a prompt is cut, and nobody finds another's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcache as jc
from tests.engine import mock_model
from tests.engine.test_adapters import ARRAYS, CONFIG, adapter, finish, model

GREEDY = jc.SamplingParams(temperature=0.0, max_tokens=6)
WIDTH = CONFIG.hidden_size
PLACEHOLDER = 7
ROWS = np.random.default_rng(0).normal(size=(3, 40, WIDTH)).astype(np.float32) * 0.3
TABLE = ARRAYS["model.embed_tokens.weight"]


def make_engine(
    budget: int = 24, num_blocks: int = 60, caching: bool = True, decode_steps: int = 1, **options
) -> jc.Engine:
    return jc.Engine(
        model(),
        CONFIG,
        cache=jc.CacheConfig(4, num_blocks, enable_prefix_caching=caching),
        scheduler=jc.SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=60, decode_steps=decode_steps
        ),
        buckets=jc.Buckets((24,), (4,), tile_size=24),
        **options,
    )


@functools.cache
def plain() -> jc.Engine:
    return make_engine(caching=False)


def image(nth: int, offset: int, length: int = 9, **options) -> jc.Feature:
    return jc.Feature(offset, ROWS[nth, :length], **options)


def prompt(*features: jc.Feature, size: int = 21) -> jc.PromptInputs:
    """Tokens 0, 1, 2, ... with placeholders under `features`."""
    token_ids = np.arange(size)
    for feature in features:
        token_ids[feature.offset : feature.offset + len(feature.embeds)] = PLACEHOLDER
    return jc.PromptInputs(token_ids, features)


def ask(engine, inputs, params=GREEDY, **options):
    (output,) = engine.generate(inputs, params, **options)
    return output.token_ids, output.num_cached_tokens


def test_rows_that_are_the_tokens_own_change_nothing():
    """Of prompt embeddings, and of features on some of the tokens."""
    engine = make_engine()
    tokens = np.arange(21)
    expected = ask(plain(), tokens)[0]
    assert ask(engine, jc.PromptInputs(embeds=TABLE[tokens])) == (expected, 0)
    features = [jc.Feature(2, TABLE[2:11]), jc.Feature(11, TABLE[11:12])]
    assert ask(engine, jc.PromptInputs(tokens, features)) == (expected, 0)
    assert ask(engine, tokens) == (expected, 0)


@pytest.mark.parametrize("budget", [24, 5])
def test_chunks_hits_and_preemption_feed_the_right_rows(budget):
    prompts = [prompt(image(nth % 2, 2), image(2, 13, 4), size=20 + nth) for nth in range(6)]
    prompts += [jc.PromptInputs(embeds=ROWS[nth % 2, : 18 + nth]) for nth in range(4)]
    expected = [ask(plain(), one)[0] for one in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    engine = make_engine(budget, num_blocks=18)
    for _ in range(2):
        outputs = engine.generate(prompts, GREEDY, progress=False)
        assert [output.token_ids for output in outputs] == expected
    stats = engine.stats()
    assert stats["num_preemptions"] > 0
    assert stats["prefix_cache_hits"] > 0
    assert engine.core.kv.num_held == 0


def test_a_last_row_of_its_own_is_fed_however_many_steps_a_call_takes():
    """Its token says nothing: as one of several decode steps in a call it would be taken for the placeholder."""
    inputs = prompt(image(0, 12), size=21)
    engine = make_engine(5, decode_steps=4)
    assert [ask(engine, inputs) for _ in range(2)] == [(ask(plain(), inputs)[0], cached) for cached in (0, 20)]


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (prompt(image(0, 2)), prompt(image(0, 2)), 20),
        (prompt(image(0, 2)), prompt(image(1, 2)), 0),
        (prompt(image(0, 4, 4)), prompt(image(1, 4, 4)), 4),
        (prompt(image(0, 2)), prompt(image(0, 3)), 0),
        (prompt(image(0, 8)), prompt(image(1, 8)), 8),
        (prompt(image(0, 2)), prompt(image(0, 2), image(1, 12, 4)), 12),
        (prompt(image(0, 2)), jc.PromptInputs(prompt(image(0, 2)).token_ids), 0),
        (prompt(image(0, 8)), jc.PromptInputs(prompt(image(0, 8)).token_ids), 8),
        (prompt(image(0, 2, kind="RGB")), prompt(image(0, 2, kind="BGR")), 0),
        (prompt(image(0, 2, identifier="x")), prompt(image(0, 2, identifier="x")), 20),
        (prompt(image(0, 2, identifier="x")), prompt(image(0, 2, identifier="y")), 0),
    ],
    ids=[
        "same", "other image", "whole block before", "one token later", "text before", "second image",
        "bare placeholders", "bare placeholders later", "mode", "same identifier", "other identifier",
    ],
)  # fmt: skip
def test_what_a_feature_shares(first, second, cached):
    engine = make_engine()
    ask(engine, first)
    tokens, found = ask(engine, second)
    assert found == cached
    assert tokens == ask(plain(), second)[0]


def test_what_prompt_embeddings_share():
    """D12: placeholder ids are equal (zeros), so only the rows tell two prompts apart."""
    engine = make_engine()
    other = ROWS[0, :21].copy()
    other[13, 5] += 1e-6
    ask(engine, jc.PromptInputs(embeds=ROWS[0, :21]))
    assert ask(engine, jc.PromptInputs(embeds=ROWS[0, :21]))[1] == 20
    assert ask(engine, jc.PromptInputs(embeds=other))[1] == 12
    assert ask(engine, jc.PromptInputs(embeds=ROWS[1, :21]))[1] == 0
    assert ask(engine, [0] * 21)[1] == 0
    assert ask(engine, jc.PromptInputs(embeds=ROWS[0, :21]), cache_salt="s")[1] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_rows_of_other_dtypes_are_told_apart_by_value(dtype):
    """Equal bytes as float16 and bfloat16 are different rows."""
    engine = make_engine()
    rows = np.asarray(jnp.asarray(ROWS[0, :21]).astype(jnp.bfloat16))
    ask(engine, jc.PromptInputs(embeds=rows))
    if dtype == "float16":
        assert ask(engine, jc.PromptInputs(embeds=rows.view(np.float16)))[1] == 0
    else:
        assert ask(engine, jc.PromptInputs(embeds=rows.astype(dtype)))[1] == 20


def test_the_callers_array_may_change_afterwards():
    engine = make_engine(budget=5)
    rows = ROWS[0, :21].copy()
    name = engine.add_request(jc.PromptInputs(embeds=rows), GREEDY)
    engine.step()
    rows[:] = 0
    expected = ask(plain(), jc.PromptInputs(embeds=ROWS[0, :21]))[0]
    assert finish(engine)[name].token_ids == expected
    assert ask(engine, jc.PromptInputs(embeds=ROWS[0, :21])) == (expected, 20)


def test_features_adapters_and_salts_together():
    engine = make_engine(lora=jc.LoRAConfig(2, 4))
    engine.load_adapter("a", adapter(0))
    inputs = prompt(image(0, 2))
    answers = {}
    for name in (None, "a"):
        for salt in (None, "s"):
            answers[name, salt] = ask(engine, inputs, adapter=name, cache_salt=salt)
            assert answers[name, salt][1] == 0
            assert ask(engine, inputs, adapter=name, cache_salt=salt) == (answers[name, salt][0], 20)
    assert answers[None, None] == answers[None, "s"] == (ask(plain(), inputs)[0], 0)
    assert answers["a", None] == answers["a", "s"] != answers[None, None]


def test_a_second_turn_goes_on_behind_the_first():
    engine = make_engine()
    first = prompt(image(0, 2))
    tokens, _ = ask(engine, first)
    longer = jc.PromptInputs([*first.token_ids, *tokens, 5, 6], first.features)
    answer, cached = ask(engine, longer)
    assert cached == 24
    assert answer == ask(plain(), longer)[0]


def test_embedding_and_prompt_logprobs_of_features():
    engine = make_engine(budget=5)
    inputs = [prompt(image(nth, 2)) for nth in range(2)]
    vectors = engine.embed(inputs, pooling="mean")
    np.testing.assert_allclose(vectors, plain().embed(inputs, pooling="mean"), atol=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    params = jc.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (warm,), (cold,) = (one.generate(inputs[0], params) for one in (engine, plain()))
    assert warm.num_cached_tokens == 0
    for mine, theirs in zip(warm.prompt_logprobs[1:], cold.prompt_logprobs[1:], strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_plain_steps_do_not_know_of_embeddings_and_warmup_compiles_both():
    engine = make_engine()
    seen = []
    call = engine.runner._call
    engine.runner._call = lambda step, sampling, rows: (seen.append(rows), call(step, sampling, rows))[1]
    engine.warmup(progress=False, embeds=True)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    del seen[:]
    ask(engine, np.arange(21))
    assert seen == [None] * 6
    ask(engine, prompt(image(0, 2)))
    assert [rows is not None for rows in seen[6:]] == [True] + [False] * 5
    jax.monitoring.clear_event_listeners()
    assert compiled == []


BAD_ROWS = r"must be \[tokens, width\] of floating point, got"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jc.PromptInputs(), "PromptInputs take token_ids or embeds, one of the two"),
        (lambda: jc.PromptInputs([1], embeds=ROWS[0]), "PromptInputs take token_ids or embeds, one of the two"),
        (lambda: jc.PromptInputs([1], [("x", 0, 1)]), "features must be Feature objects, got tuple"),
        (
            lambda: prompt(image(0, 0, identifier="x"), image(1, 9, identifier="x")),
            "two features go by the identifier 'x', but their embeds differ",
        ),
        (lambda: jc.PromptInputs(embeds=ROWS), rf"PromptInputs\.embeds {BAD_ROWS} \[3, 40, 36\] of float32"),
        (lambda: jc.PromptInputs(embeds=np.ones((2, 36), int)), rf"{BAD_ROWS} \[2, 36\] of int64"),
        (lambda: jc.Feature(0, np.zeros((0, 36), np.float32)), rf"a feature's embeds {BAD_ROWS} \[0, 36\]"),
        (lambda: jc.Feature(0, np.full((1, 36), np.nan)), "a feature's embeds must be finite"),
        (lambda: jc.Feature(1.5, ROWS[0]), r"a feature's offset must be an integer, got 1\.5"),
        (lambda: jc.Feature(0, ROWS[0], kind=3), "kind must be a string, got 3"),
    ],
)
def test_inputs_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (jc.PromptInputs([1, 2], [jc.Feature(0, ROWS[0, :1, :8])]), "as wide as the model's, which is 36, got 8"),
        (jc.PromptInputs([1, 2], [image(0, 0, identifier="")]), "feature 0 needs an identifier derived from its"),
        (jc.PromptInputs([1, 2], [image(0, 0)]), r"covers tokens \[0, 9\), but the prompt has \[0, 2\)"),
        (jc.PromptInputs(range(20), [image(0, -1)]), r"covers tokens \[-1, 8\)"),
        (
            jc.PromptInputs(range(20), [image(0, 9), image(0, 0)]),
            "sort features by offset, and let",
        ),
        (
            jc.PromptInputs(range(20), [image(0, 0), image(0, 8)]),
            "begins at token 8, but the one before",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_and_leave_nothing(inputs, message):
    engine = plain()
    with pytest.raises(ValueError, match=message):
        engine.add_request(inputs, GREEDY)
    assert not engine.has_unfinished


def test_a_model_that_takes_no_embeddings():
    with pytest.raises(ValueError, match="this model's config has no hidden_size, so it takes no embeddings"):
        mock_model.make_engine(cache=jc.CacheConfig(4, 40)).add_request(jc.PromptInputs(embeds=ROWS[0]), GREEDY)

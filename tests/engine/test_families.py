"""Every model family in the engine: several KV-cache groups in one pool, and caching changes no answer."""

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcache as jc
from jaxcache.core.specs import RecurrentSpec, SlidingWindowSpec
from jaxcache.models.config import ModelConfig
from jaxcache.models.loading.families import FAMILIES

DATA = Path(__file__).parents[1] / "data/families"
NAMES = ["qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "mixtral", "recurrent_gemma"]
BUCKETS = jc.Buckets((24,), (4,), tile_size=24)
GREEDY = jc.SamplingParams(temperature=0.0, max_tokens=10)


@functools.cache
def load(name: str):
    with np.load(DATA / f"{name}.npz") as file:
        arrays = dict(file)
    hf_config = json.loads(str(arrays.pop("config")))
    del arrays["tokens"], arrays["logits"]
    config = dataclasses.replace(ModelConfig.from_hf(hf_config), max_position=128)
    return FAMILIES[hf_config["model_type"]].from_tensors(config, arrays, jnp.dtype("float32")), config


def make_engine(name: str, num_blocks: int, caching: bool = True) -> jc.Engine:
    model, config = load(name)
    return jc.Engine(
        model,
        config,
        cache=jc.CacheConfig(block_size=8, num_blocks=num_blocks, enable_prefix_caching=caching),
        scheduler=jc.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96),
        buckets=BUCKETS,
    )


def workload(vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts that begin with one of two texts of 35 and 42 tokens."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocab_size, size).tolist() for size in (35, 42)]
    return [texts[nth % 2] + rng.integers(0, vocab_size, 2 + nth).tolist() for nth in range(7)]


LIKE_OTHERS = ("qwen2", "mistral", "gemma2", "qwen3_moe", "mixtral")
"""Families whose groups are those of another one."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in NAMES]
)
def test_caching_changes_no_answer(name):
    config = load(name)[1]
    num_groups = len(config.layer_groups)
    plain = make_engine(name, 60 * num_groups, caching=False)
    tight = make_engine(name, 1 + 20 * num_groups)
    prompts = workload(config.vocab_size, 0)
    expected = [o.token_ids for o in plain.generate(prompts, GREEDY, progress=False)]
    for _ in range(2):
        outputs = tight.generate(prompts, GREEDY, progress=False)
        assert [o.token_ids for o in outputs] == expected
        tight.core.kv.check_invariants()
        assert tight.core.kv.num_held == 0
    stats = tight.stats()
    assert stats["prefix_cache_hits"] > 0.25 * stats["prefix_cache_queries"]
    assert stats["num_evicted_blocks"] > 0


@pytest.mark.parametrize("name", ["gemma3", "recurrent_gemma"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_the_same_the_second_time(name, pooling):
    """The last token's state must not come from a state or a window that another request left half done."""
    config = load(name)[1]
    prompts = workload(config.vocab_size, 1)
    expected = make_engine(name, 60 * len(config.layer_groups), caching=False).embed(prompts, pooling=pooling)
    engine = make_engine(name, 1 + 40 * len(config.layer_groups))
    for _ in range(2):
        np.testing.assert_allclose(engine.embed(prompts, pooling=pooling), expected, atol=1e-4)
    hits = engine.stats()["prefix_cache_hits"]
    assert hits > 100 if pooling == "last" else hits == 0
    engine.core.kv.check_invariants()


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "recurrent_gemma"])
def test_what_each_group_holds_stays_bounded(name):
    """However long the text: a window's blocks by its size, a state by two."""
    engine = make_engine(name, 150)
    engine.add_request(list(range(20)), jc.SamplingParams(temperature=0.0, max_tokens=70))
    limits = []
    for manager in engine.core.kv.coordinator.managers:
        spec = manager.spec
        window = spec.sliding_window // spec.block_size + 2 if isinstance(spec, SlidingWindowSpec) else 99
        limits.append(2 if isinstance(spec, RecurrentSpec) else window)
    assert min(limits) < 9
    while engine.has_unfinished:
        engine.step()
        held = [np.count_nonzero(ids) for ids in engine.core.kv.coordinator.block_ids("request-0/0")]
        assert all(n <= limit for n, limit in zip(held, limits)), (held, limits)
    engine.core.kv.check_invariants()


def test_memory_is_one_array_for_all_groups():
    _, config = load("gemma3")
    engine = make_engine("gemma3", 60)
    layers = max(map(len, config.layer_groups))
    assert len(config.layer_groups) > 1
    assert layers < config.num_layers
    block_bytes = layers * 2 * config.num_kv_heads * config.head_dim * 8 * 4
    assert engine.stats()["kv_cache_bytes"] == 60 * block_bytes


def test_too_few_blocks_for_the_groups():
    with pytest.raises(
        ValueError, match=r"max_model_len 96 needs \d+ blocks of 8 tokens, but the pool has 9 usable"
    ):
        make_engine("gemma3", 10)


def test_a_model_that_looks_ahead_is_embedded_in_whole_sequences_without_a_cache(caplog):
    engine = make_engine("gemma3_bidirectional", 60)
    assert "prefix caching is off" in caplog.text
    prompts = [list(range(3, 20)), list(range(3, 11))]
    together = engine.embed(prompts, pooling="mean")
    alone = np.concatenate([engine.embed(p, pooling="mean") for p in prompts])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    with pytest.raises(
        ValueError, match="the prompt has 30 tokens and is computed in one step, which may have 24"
    ):
        engine.embed(list(range(30)))
    assert engine.stats()["prefix_cache_queries"] == 0
    with pytest.raises(ValueError, match="this model cannot generate: its tokens see those after them"):
        engine.generate(prompts)

"""Adapters in the engine: answers are those of the merged weights, caches stay apart, versions come and go."""

import functools
import gc

import jax
import numpy as np
import pytest
from flax import nnx

import jaxcache as jc
from jaxcache.core.events import KVEventsConfig
from jaxcache.models.lora import LoRAAdapter
from tests.engine.mock_model import MockConfig, MockModel
from tests.models.adapters import merged, random_adapter, weights_of
from tests.models.test_lora import save_peft

GREEDY = jc.SamplingParams(temperature=0.0, max_tokens=6)
BUCKETS = jc.Buckets((24,), (4,), tile_size=24)
FAMILY, CONFIG, ARRAYS = weights_of("llama")
PROMPT = list(range(21))
ROOM = jc.LoRAConfig(max_loras=2, max_lora_rank=4)


@functools.cache
def adapter(seed: int) -> LoRAAdapter:
    return random_adapter(ARRAYS, seed, rank=3)


@functools.cache
def model(seed: int | None = None):
    """The base model, or the one with adapter `seed` in its weights."""
    return FAMILY.from_tensors(CONFIG, ARRAYS if seed is None else merged(ARRAYS, adapter(seed)))


def make_engine(seed: int | None = None, lora: jc.LoRAConfig | None = ROOM, **options) -> jc.Engine:
    cache = {"block_size": 4, "num_blocks": 60} | options
    return jc.Engine(
        model(seed),
        CONFIG,
        cache=jc.CacheConfig(**cache),
        scheduler=jc.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=60),
        buckets=BUCKETS,
        lora=lora,
    )


@functools.cache
def expected(seed: int | None, prompt: tuple[int, ...], max_tokens: int = 6) -> list[int]:
    """From merged weights, without a cache and without slots."""
    engine = make_engine(seed, lora=None, enable_prefix_caching=False)
    return engine.generate(list(prompt), jc.SamplingParams(temperature=0.0, max_tokens=max_tokens))[0].token_ids


def ask(engine, name=None, prompt=PROMPT):
    (output,) = engine.generate(prompt, GREEDY, adapter=name)
    return output.token_ids, output.num_cached_tokens


def finish(engine) -> dict[str, jc.RequestOutput]:
    ended = {}
    while engine.has_unfinished:
        ended |= {delta.request_id: delta.output for delta in engine.step() if delta.finish_reason}
    assert engine.core.kv.num_held == 0
    engine.core.kv.check_invariants()
    return ended


@pytest.mark.parametrize("num_blocks", [60, 18])
def test_a_mixed_batch_answers_as_merged_weights_do_with_and_without_a_cache(num_blocks):
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, CONFIG.vocab_size, 14).tolist()
    prompts = [prefix + rng.integers(0, CONFIG.vocab_size, 1 + nth).tolist() for nth in range(6)]
    engines = [make_engine(num_blocks=num_blocks, enable_prefix_caching=caching) for caching in (True, False)]
    for engine in engines:
        for seed in range(2):
            engine.load_adapter(f"a{seed}", adapter(seed))
        for _ in range(2):
            seeds = {}
            for nth, prompt in enumerate(prompts):
                for seed in (None, 0, 1)[: 1 + nth % 3]:
                    name = None if seed is None else f"a{seed}"
                    seeds[engine.add_request(prompt, GREEDY, adapter=name)] = seed
            for name, output in finish(engine).items():
                assert output.token_ids == expected(seeds[name], tuple(output.prompt_token_ids))
    assert engines[0].stats()["prefix_cache_hits"] > 0
    assert (num_blocks == 60) or engines[0].stats()["num_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "recurrent_gemma"])
def test_models_of_several_groups(name):
    """Windows and states are kept apart by adapter as well, and evicted under pressure."""
    family, config, arrays = weights_of(name)
    change = random_adapter(arrays, 0)

    def make(arrays, **options):
        cache = {"block_size": 8, "num_blocks": 1 + 20 * len(config.layer_groups)} | options.pop("cache", {})
        return jc.Engine(
            family.from_tensors(config, arrays),
            config,
            cache=jc.CacheConfig(**cache),
            scheduler=jc.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96),
            buckets=jc.Buckets((24,), (4,), tile_size=24),
            **options,
        )

    engine = make(arrays, lora=ROOM)
    engine.load_adapter("a", change)
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, config.vocab_size, 34).tolist()
    prompts = [prefix + rng.integers(0, config.vocab_size, 2 + nth).tolist() for nth in range(3)]
    told = {}
    for key, weights in ((None, arrays), ("a", merged(arrays, change))):
        outputs = make(weights, cache={"enable_prefix_caching": False}).generate(prompts, GREEDY, progress=False)
        told[key] = [output.token_ids for output in outputs]
    assert told[None] != told["a"]
    for _ in range(2):
        asked = {
            engine.add_request(p, GREEDY, adapter=key): (key, n) for n, p in enumerate(prompts) for key in told
        }
        for request_id, output in finish(engine).items():
            key, nth = asked[request_id]
            assert output.token_ids == told[key][nth]
    assert engine.stats()["prefix_cache_hits"] > 0


def test_nobody_finds_what_another_adapter_or_the_base_model_computed():
    engine = make_engine()
    engine.load_adapter("a", adapter(0))
    engine.load_adapter("b", adapter(1))
    answers = {}
    for name, seed in ((None, None), ("a", 0), ("b", 1)):
        answers[name] = ask(engine, name)
        assert answers[name] == (expected(seed, tuple(PROMPT)), 0)
    assert len({tuple(tokens) for tokens, _ in answers.values()}) == 3
    for name, (tokens, _) in answers.items():
        assert ask(engine, name) == (tokens, 20)


def test_a_replaced_adapter_finds_nothing_of_the_one_before():
    engine = make_engine()
    first = engine.load_adapter("a", adapter(0))
    ask(engine, "a")
    second = engine.load_adapter("a", adapter(1), replace=True)
    assert (second.slot, second.version) == (first.slot, first.version + 1)
    assert ask(engine, "a") == (expected(1, tuple(PROMPT)), 0)
    engine.unload_adapter("a")
    engine.load_adapter("a", adapter(1))
    assert ask(engine, "a") == (expected(1, tuple(PROMPT)), 0)
    assert ask(engine, "a") == (expected(1, tuple(PROMPT)), 20)


@pytest.mark.parametrize("unload", [True, False])
def test_requests_end_with_the_weights_that_they_began_with(unload):
    engine = make_engine()
    engine.load_adapter("a", adapter(0))
    old = engine.add_request(PROMPT, GREEDY, adapter="a")
    waiting = engine.add_request(PROMPT[:9], GREEDY, adapter="a")
    engine.step()
    if unload:
        engine.unload_adapter("a")
        with pytest.raises(ValueError, match="adapter 'a' is not loaded: loaded are none"):
            engine.add_request(PROMPT, GREEDY, adapter="a")
        assert engine.adapters == ()
    loaded = engine.load_adapter("a", adapter(1), replace=True)
    assert engine.adapters == (loaded,)
    new = engine.add_request(PROMPT, GREEDY, adapter="a")
    with pytest.raises(
        ValueError, match=r"all 2 slots for adapters are taken: loaded are 'a'; unfinished .*'a' \("
    ):
        engine.load_adapter("b", adapter(0))
    assert engine.reset_prefix_cache(reset_running=True)
    ended = finish(engine)
    assert ended[old].token_ids == expected(0, tuple(PROMPT))
    assert ended[waiting].token_ids == expected(0, tuple(PROMPT[:9]))
    assert ended[new].token_ids == expected(1, tuple(PROMPT))
    assert engine.load_adapter("b", adapter(0)).slot == 3 - loaded.slot
    assert ask(engine, "b")[0] == expected(0, tuple(PROMPT))


def test_a_slot_is_free_again_however_its_requests_end(monkeypatch):
    engine = make_engine(lora=jc.LoRAConfig(1, 4))
    for nth in range(3):
        engine.load_adapter("a", adapter(0), replace=True)
        name = engine.add_request(PROMPT, jc.SamplingParams(temperature=0.0, max_tokens=50, n=2), adapter="a")
        engine.step()
        with pytest.raises(ValueError, match="all 1 slots for adapters are taken"):
            engine.load_adapter("a", adapter(1), replace=True)
        assert ask(engine, "a")[0] == expected(0, tuple(PROMPT))
        if nth < 2:
            engine.abort(name)
        else:
            run = engine.runner._call
            monkeypatch.setattr(engine.runner, "_call", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
            with pytest.raises(RuntimeError, match="lost"):
                engine.step()
            monkeypatch.setattr(engine.runner, "_call", run)
    engine.load_adapter("a", adapter(1), replace=True)
    assert ask(engine, "a") == (expected(1, tuple(PROMPT)), 0)


def test_other_weights_keep_the_adapters():
    engine = make_engine()
    engine.load_adapter("a", adapter(0))
    ask(engine, "a")
    engine.update_params(nnx.state(model(1)))
    assert ask(engine) == (expected(1, tuple(PROMPT)), 0)
    engine.update_params(nnx.state(model()))
    assert ask(engine, "a") == (expected(0, tuple(PROMPT)), 0)


def test_embeddings_with_an_adapter():
    engine = make_engine()
    engine.load_adapter("a", adapter(0))
    merged_engine = make_engine(0, lora=None)
    for pooling in ("last", "mean"):
        np.testing.assert_allclose(
            engine.embed(PROMPT, pooling=pooling, adapter="a"),
            merged_engine.embed(PROMPT, pooling=pooling),
            atol=1e-5,
        )


def test_loading_compiles_nothing_and_keeps_no_memory():
    engine = make_engine()
    engine.warmup(progress=False)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(engine.runner.adapters)]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    for nth in range(3):
        engine.load_adapter("a", adapter(nth % 2), replace=True)
        ask(engine, "a")
        ask(engine)
    engine.unload_adapter("a")
    jax.monitoring.clear_event_listeners()
    assert compiled == []
    gc.collect()
    assert [leaf.nbytes for leaf in jax.tree.leaves(engine.runner.adapters)] == sizes
    assert not jax.tree.leaves(make_engine(lora=None).runner.adapters)


def test_events_carry_the_adapter():
    engine = jc.Engine(
        model(),
        CONFIG,
        cache=jc.CacheConfig(4, 60),
        scheduler=jc.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=60),
        buckets=BUCKETS,
        lora=ROOM,
        events=KVEventsConfig(enable_kv_cache_events=True),
    )
    loaded = engine.load_adapter("a", adapter(0))
    ask(engine, "a")
    assert {(event.lora_name, event.lora_id) for event in engine.core.kv.take_events()} == {("a", loaded.version)}


def test_a_folder_that_peft_saved(tmp_path):
    folder = save_peft(tmp_path / "x", adapter(0), r=3, lora_alpha=1.5)
    engine = make_engine()
    loaded = engine.load_adapter("x", folder)
    assert (loaded.name, loaded.rank) == ("x", 3)
    assert ask(engine, "x")[0] == expected(0, tuple(PROMPT))


def test_what_cannot_be_loaded_or_named():
    engine = make_engine()
    engine.load_adapter("a", adapter(0))
    before = ask(engine, "a")[0]
    with pytest.raises(ValueError, match="an adapter 'a' is loaded: unload it, give another name, or"):
        engine.load_adapter("a", adapter(1))
    with pytest.raises(ValueError, match=r"rank 5, but LoRAConfig\.max_lora_rank is 4"):
        engine.load_adapter("a", random_adapter(ARRAYS, 0, rank=5), replace=True)
    assert ask(engine, "a")[0] == before
    for name in ("", None, 3):
        with pytest.raises(ValueError, match="an adapter's name must be a string and not empty"):
            engine.load_adapter(name, adapter(0))
    with pytest.raises(ValueError, match="adapter 'b' is not loaded: loaded are 'a'"):
        engine.add_request(PROMPT, GREEDY, adapter="b")
    with pytest.raises(ValueError, match="adapter 'b' is not loaded"):
        engine.unload_adapter("b")
    engine.load_adapter("b", adapter(1))
    with pytest.raises(ValueError, match=r"all 2 slots for adapters are taken: loaded are 'a', 'b'\. Unload one"):
        engine.load_adapter("c", adapter(1))
    assert not engine.has_unfinished
    with pytest.raises(ValueError, match=r"no room for adapters: make it with lora=LoRAConfig\(\.\.\.\)"):
        make_engine(lora=None).load_adapter("a", adapter(0))
    with pytest.raises(ValueError, match=r"adapters need a model of jaxcache\.models, got MockModel"):
        jc.Engine(MockModel(MockConfig()), MockConfig(), lora=jc.LoRAConfig())

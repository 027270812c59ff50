"""Random lives of an engine: add, step, abort, reset, other weights, adapters that come and go, failing steps, in
a pool that is too small.

After every operation the bookkeeping must agree, and everything that nobody may read is filled with NaN: slots of
free blocks without a name, slots that are not written yet, the null block, adapters that nobody uses. At the end
all blocks are free, and every token of every answer is the most likely one under an engine without a cache.

120 runs make about 10,000 operations; ENGINE_MACHINE_RUNS=2000 makes more.
"""

import os
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxcache as jc
from jaxcache.engine import runner as runner_module
from jaxcache.engine.adapters import LoadedAdapter
from jaxcache.models.config import ModelConfig
from jaxcache.models.llama import Llama
from jaxcache.models.rope import RopeConfig

CONFIG = ModelConfig(
    vocab_size=31,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rope=RopeConfig(),
)


def random_model(seed: int) -> Llama:
    """With weights so large that another prefix gives other tokens."""
    model = Llama(CONFIG, rngs=nnx.Rngs(seed))
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim > 2 else leaf, state))


def random_adapter(seed: int) -> jc.LoRAAdapter:
    rng, weights = np.random.default_rng(seed), {}
    sizes = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
    for layer in range(2):
        for name, (inside, out) in sizes.items():
            pair = rng.normal(size=(2, inside)) / 4, rng.normal(size=(out, 2))
            weights[f"model.layers.{layer}.self_attn.{name}"] = pair
    return jc.LoRAAdapter(weights)


MODELS = [random_model(nth) for nth in range(2)]
ADAPTERS = [random_adapter(nth) for nth in range(3)]
ROOM = jc.LoRAConfig(max_loras=2, max_lora_rank=2)
TABLES = [np.random.default_rng(nth).normal(size=(31, 32)).astype(np.float32) for nth in range(2)]
"""Rows in the place of tokens' embeddings."""
NUM_BLOCKS, BLOCK = 22, 4
CACHE = jc.CacheConfig(block_size=BLOCK, num_blocks=NUM_BLOCKS)
BUCKETS = jc.Buckets((24,), (8,), tile_size=8)
SCHEDULER = jc.SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=24, max_model_len=60)
PREFIXES = [[1, 2, 3] * 7, [1, 2, 3] * 7, [1, 2, 3] * 3 + [4] * 12]


def make_oracle(model: Llama) -> jc.Engine:
    engine = jc.Engine(
        model,
        CONFIG,
        cache=jc.CacheConfig(BLOCK, 40, enable_prefix_caching=False),
        scheduler=jc.SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64),
        buckets=jc.Buckets((64,), (1,), tile_size=64),
        lora=jc.LoRAConfig(max_loras=len(ADAPTERS), max_lora_rank=2),
    )
    for nth, adapter in enumerate(ADAPTERS):
        engine.load_adapter(str(nth), adapter)
    return engine


ORACLES = [make_oracle(model) for model in MODELS]


@dataclass
class Asked:
    """A request, and what its answer depends on."""

    inputs: jc.PromptInputs
    output: jc.RequestOutput
    adapter: LoadedAdapter | None
    arguments: tuple
    """Of `EngineMachine.ask`."""
    weights: list[int] = field(default_factory=list)
    """For each token of the answer, the weights that chose it."""

    def whole(self, tokens: list[int], weights: int) -> jc.PromptInputs:
        """Prompt and answer as one prompt."""
        if self.inputs.embeds is None:
            return jc.PromptInputs([*self.inputs.token_ids, *tokens], self.inputs.features)
        table = np.asarray(MODELS[weights].embed.table[...])
        return jc.PromptInputs(embeds=np.concatenate([self.inputs.embeds, table[tokens]]))


@jax.jit
def poison(data, readable):
    """NaN wherever `readable` [blocks, slots] is false."""
    return jnp.where(readable[None, :, None, None, :, None], data, jnp.nan)


@jax.jit
def poison_slots(adapters, free):
    """NaN wherever `free` [slots] is true, in every A: what is multiplied with it must be dropped."""

    def fill(path, leaf):
        is_a = any(getattr(key, "key", None) == "a" for key in path)
        return jnp.where(free[:, None], jnp.nan, leaf) if is_a else leaf

    return jax.tree.map_with_path(fill, adapters)


class DeviceLost(RuntimeError):
    pass


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.make(policy="fcfs", watermark=0.0)

    def make(self, **options) -> None:
        self.weights = 0
        scheduler = jc.SchedulerConfig(**{**vars(SCHEDULER), **options})
        self.engine = jc.Engine(MODELS[0], CONFIG, cache=CACHE, scheduler=scheduler, buckets=BUCKETS, lora=ROOM)
        self.asked: dict[str, Asked] = {}
        self.loaded: dict[str, LoadedAdapter] = {}
        """What each adapter's name stands for."""
        self.content_of: dict[int, int] = {}
        """By version."""
        self.poisoned = None
        self.aborted: set[str] = set()
        self.failed: set[str] = set()

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.2]),
        decode_steps=st.sampled_from([1, 1, 3]),
    )
    def start_with(self, **options):
        self.make(**options)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        keep=st.sampled_from([3, 7, 9, 13, 14, 17, 18, 20, 21]),
        own=st.lists(st.integers(0, 30), max_size=6),
        salt=st.sampled_from([None, None, None, "s"]),
        max_tokens=st.integers(1, 16),
        priority=st.integers(0, 2),
        skip=st.sampled_from([None, None, None, "read", "write", "low"]),
        adapter=st.sampled_from([None, "a", "a", "b"]),
        rows=st.sampled_from([None, None, None, None, None, "feature", "embeds"]),
        table=st.integers(0, 1),
        offset=st.integers(1, 3),
    )
    def add(self, prefix, keep, own, salt, max_tokens, priority, skip, adapter, rows, table, offset):
        params = jc.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            skip_reading_prefix_cache=skip == "read",
            skip_writing_prefix_cache=skip == "write",
            cache_retention="low" if skip == "low" else "default",
        )
        token_ids = prefix[:keep] + own
        if rows == "embeds":
            inputs = jc.PromptInputs(embeds=TABLES[table][token_ids])
        elif rows == "feature" and offset + 5 <= len(token_ids):
            inputs = jc.PromptInputs(token_ids, [jc.Feature(offset, TABLES[table][:5])])
        else:
            inputs = jc.PromptInputs(token_ids)
        self.ask(inputs, params, adapter, salt, priority)

    @precondition(lambda self: self.asked)
    @rule(nth=st.integers(0, 100))
    def add_again(self, nth):
        """What was asked before, under whatever its adapter's name stands for now."""
        self.ask(*list(self.asked.values())[nth % len(self.asked)].arguments)

    def ask(self, inputs, params, adapter, salt, priority):
        loaded = self.loaded.get(adapter)
        name = self.engine.add_request(
            inputs, params, adapter=loaded and loaded.name, cache_salt=salt, priority=priority
        )
        arguments = (inputs, params, adapter, salt, priority)
        self.asked[name] = Asked(inputs, self.engine.output(name), loaded, arguments)

    @rule(name=st.sampled_from("aab"), content=st.sampled_from([0, 1, 2, None]))
    def change_adapters(self, name, content):
        """A load must work exactly where a slot is free that no name leads to and no unfinished request uses."""
        if content is None:
            if self.loaded.pop(name, None) is not None:
                self.engine.unload_adapter(name)
            return
        in_use = self.in_use()
        taken = {*self.loaded.values(), *in_use} - ({self.loaded.get(name)} - in_use)
        try:
            loaded = self.engine.load_adapter(name, ADAPTERS[content], replace=True)
        except ValueError:
            assert len(taken) == ROOM.max_loras
        else:
            assert len(taken) < ROOM.max_loras
            assert loaded.version not in self.content_of
            self.loaded[name], self.content_of[loaded.version] = loaded, content

    def in_use(self):
        return {asked.adapter for name, asked in self.asked.items() if self.engine.is_active(name)} - {None}

    @rule(steps=st.integers(1, 3))
    def step(self, steps):
        for _ in range(steps):
            for delta in self.engine.step():
                self.asked[delta.request_id].weights += [self.weights] * len(delta.token_ids)

    @rule(steps=st.integers(4, 12))
    def go_on(self, steps):
        self.step(steps)

    def abort(self, nth):
        name = sorted(self.engine._outputs)[nth % len(self.engine._outputs)]
        self.engine.abort(name)
        self.aborted.add(name)

    @rule(
        how=st.sampled_from(["abort"] * 4 + ["fail"] * 2 + ["lose the KV", "reset", "reset running", "weights"]),
        nth=st.integers(0, 100),
    )
    def disturb(self, how, nth):
        if how == "weights":
            self.weights = 1 - self.weights
            self.engine.update_params(nnx.state(MODELS[self.weights]))
        elif how.startswith("reset"):
            self.reset(how == "reset running")
        elif self.engine._outputs and how == "abort":
            self.abort(nth)
        elif self.engine._outputs:
            self.fail_a_step(kv_goes_down_with_it=how == "lose the KV")

    def reset(self, reset_running):
        running = bool(self.engine.core.scheduler.running)
        assert self.engine.reset_prefix_cache(reset_running) == (reset_running or not running)
        if reset_running or not running:
            assert len(self.engine.core.kv.index) == 0

    def fail_a_step(self, kv_goes_down_with_it):
        real = runner_module._step, runner_module.decode_steps
        kv = self.engine.runner.kv

        def broken(*_, **__):
            if kv_goes_down_with_it:
                jax.tree.map(lambda leaf: leaf.delete(), kv)
            raise DeviceLost

        before = set(self.engine._outputs)
        runner_module._step = runner_module.decode_steps = broken
        try:
            self.engine.step()
        except DeviceLost:
            self.failed |= before - set(self.engine._outputs)
        finally:
            runner_module._step, runner_module.decode_steps = real

    @invariant()
    def agrees(self):
        kv = self.engine.core.kv
        kv.check_invariants()
        readable = np.repeat(kv.pool.named()[:, None], BLOCK, axis=1)
        (manager,) = kv.coordinator.managers
        for request in self.engine.core.scheduler.running:
            table = manager.block_ids(request.request_id)
            positions = np.arange(request.num_computed_tokens)
            readable[table[positions // BLOCK], positions % BLOCK] = True
        readable[0] = False
        runner = self.engine.runner
        runner.kv = runner.kv._replace(data=poison(runner.kv.data, readable))
        used = {loaded.slot for loaded in (*self.loaded.values(), *self.in_use())}
        if self.poisoned != (used, {*self.content_of}):
            self.poisoned = used, {*self.content_of}
            free = np.array([slot not in used for slot in range(1, 1 + ROOM.max_loras)])
            runner.adapters = poison_slots(runner.adapters, free)

    def teardown(self):
        while self.engine.has_unfinished:
            self.step(1)
            self.agrees()
        assert self.engine.core.kv.num_held == 0
        stats = self.engine.core.scheduler.stats
        assert 0 <= stats.hits <= stats.queries
        assert 0 <= stats.preempted_hits <= stats.preempted_queries
        for name, asked in self.asked.items():
            (completion,) = asked.output.completions
            expected = "abort" if name in self.aborted else "error" if name in self.failed else "length"
            assert completion.finish_reason == expected or (expected == "abort" and name in self.failed)
            self.check_tokens(asked, completion.token_ids)

    def check_tokens(self, asked, tokens):
        """Each token against what an uncached engine finds most likely there, in one pass over the whole."""
        start = asked.output.num_prompt_tokens
        adapter = None if asked.adapter is None else str(self.content_of[asked.adapter.version])
        for which in sorted(set(asked.weights)):
            params = jc.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
            (output,) = ORACLES[which].generate(asked.whole(tokens, which), params, adapter=adapter)
            for nth, position in enumerate(output.prompt_logprobs[start:]):
                if asked.weights[nth] == which:
                    likely = [token for token, logprob in position.top if logprob >= position.top[0][1] - 1e-4]
                    assert tokens[nth] in likely, (nth, asked, tokens)


EngineMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("ENGINE_MACHINE_RUNS", "120")),
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = pytest.mark.slow(EngineMachine.TestCase)
"""A step of its own in `.ci/run`."""

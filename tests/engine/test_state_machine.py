"""Random lives of an engine: add, step, abort, reset, other weights, failing steps, in a pool that is too small.

After every operation the bookkeeping must agree, and everything that nobody may read is filled with NaN: slots of
free blocks without a name, slots that are not written yet, the null block. At the end all blocks are free, and
every token of every answer is the most likely one under an engine without a cache.

120 runs make about 10,000 operations; ENGINE_MACHINE_RUNS=2000 makes more.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import jaxcache as jc
from jaxcache.engine import runner as runner_module
from tests.engine.mock_model import MockConfig, MockModel

CONFIG = MockConfig(vocab_size=31, max_position=64)
MODELS = [MockModel(CONFIG, seed=nth) for nth in range(2)]
NUM_BLOCKS, BLOCK = 22, 4
CACHE = jc.CacheConfig(block_size=BLOCK, num_blocks=NUM_BLOCKS)
BUCKETS = jc.Buckets((8, 24), (8,), tile_size=8)
SCHEDULER = jc.SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=24, max_model_len=60)
PREFIXES = [[1, 2, 3] * 5, [1, 2, 3] * 3 + [4] * 9, [7] * 21]

ORACLES = [
    jc.Engine(
        model,
        CONFIG,
        cache=jc.CacheConfig(BLOCK, 40, enable_prefix_caching=False),
        scheduler=jc.SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64),
        buckets=jc.Buckets((64,), (1,), tile_size=64),
    )
    for model in MODELS
]


@jax.jit
def poison(data, readable):
    """NaN wherever `readable` [blocks, slots] is false."""
    return jnp.where(readable[None, :, None, None, :, None], data, jnp.nan)


class DeviceLost(RuntimeError):
    pass


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.make(policy="fcfs", watermark=0.0)

    def make(self, **options) -> None:
        self.weights = 0
        scheduler = jc.SchedulerConfig(**{**vars(SCHEDULER), **options})
        self.engine = jc.Engine(MODELS[0], CONFIG, cache=CACHE, scheduler=scheduler, buckets=BUCKETS)
        self.outputs: dict[str, jc.RequestOutput] = {}
        self.weights_of: dict[str, list[int]] = {}
        """For each token of each answer, the weights that chose it."""
        self.aborted: set[str] = set()
        self.failed: set[str] = set()

    @precondition(lambda self: not self.outputs)
    @rule(policy=st.sampled_from(["fcfs", "priority"]), watermark=st.sampled_from([0.0, 0.2]))
    def start_with(self, policy, watermark):
        self.make(policy=policy, watermark=watermark)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        keep=st.integers(3, 21),
        own=st.lists(st.integers(0, 30), max_size=6),
        salt=st.sampled_from([None, None, "s"]),
        max_tokens=st.integers(1, 24),
        priority=st.integers(0, 2),
        skip=st.sampled_from([None, None, None, "read", "write", "low"]),
    )
    def add(self, prefix, keep, own, salt, max_tokens, priority, skip):
        params = jc.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            skip_reading_prefix_cache=skip == "read",
            skip_writing_prefix_cache=skip == "write",
            cache_retention="low" if skip == "low" else "default",
        )
        name = self.engine.add_request(prefix[:keep] + own, params, cache_salt=salt, priority=priority)
        self.outputs[name] = self.engine._outputs[name]
        self.weights_of[name] = []

    @rule(steps=st.integers(1, 3))
    def step(self, steps):
        for _ in range(steps):
            for delta in self.engine.step():
                self.weights_of[delta.request_id] += [self.weights] * len(delta.token_ids)

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(nth=st.integers(0, 100))
    def abort(self, nth):
        name = sorted(self.engine._outputs)[nth % len(self.engine._outputs)]
        self.engine.abort(name)
        self.aborted.add(name)

    @rule(how=st.sampled_from(["reset", "reset running", "weights", "fail", "fail", "fail", "lose the KV"]))
    def disturb(self, how):
        if how == "weights":
            self.weights = 1 - self.weights
            self.engine.update_params(nnx.state(MODELS[self.weights]))
        elif how.startswith("reset"):
            self.reset(how == "reset running")
        elif self.engine.has_unfinished:
            self.fail_a_step(kv_goes_down_with_it=how == "lose the KV")

    def reset(self, reset_running):
        running = bool(self.engine.core.scheduler.running)
        assert self.engine.reset_prefix_cache(reset_running) == (reset_running or not running)
        if reset_running or not running:
            assert len(self.engine.core.kv.index) == 0

    def fail_a_step(self, kv_goes_down_with_it):
        real = runner_module._step

        def broken(graphdef, params, kv, *rest):
            if kv_goes_down_with_it:
                jax.tree.map(lambda leaf: leaf.delete(), kv)
            raise DeviceLost

        before = set(self.engine._outputs)
        runner_module._step = broken
        try:
            self.engine.step()
        except DeviceLost:
            self.failed |= before - set(self.engine._outputs)
        finally:
            runner_module._step = real

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

    def teardown(self):
        while self.engine.has_unfinished:
            self.step(1)
            self.agrees()
        assert self.engine.core.kv.num_held == 0
        stats = self.engine.core.scheduler.stats
        assert 0 <= stats.hits <= stats.queries
        assert 0 <= stats.preempted_hits <= stats.preempted_queries
        for name, output in self.outputs.items():
            (completion,) = output.completions
            expected = "abort" if name in self.aborted else "error" if name in self.failed else "length"
            assert completion.finish_reason == expected or (expected == "abort" and name in self.failed)
            self.check_tokens(output.prompt_token_ids, completion.token_ids, self.weights_of[name])

    def check_tokens(self, prompt, tokens, weights):
        """Each token against what an uncached engine finds most likely there, in one pass over the whole."""
        for which in sorted(set(weights)):
            params = jc.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
            scored = ORACLES[which].generate(prompt + tokens, params)[0].prompt_logprobs[len(prompt) :]
            for nth, position in enumerate(scored):
                if weights[nth] == which:
                    assert position.logprob >= position.top[0][1] - 1e-4, (nth, prompt, tokens)


EngineMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("ENGINE_MACHINE_RUNS", "120")),
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase

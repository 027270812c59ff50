"""The device calls as the engine makes them: the KV array is written where it lies, however large the pool."""

import jax
import numpy as np
import pytest

from jaxcache import Buckets, SamplingParams
from jaxcache.core import pool
from jaxcache.engine import runner as runner_module
from jaxcache.engine.multi_step import decode_steps, sequences
from jaxcache.engine.runner import ModelRunner
from jaxcache.engine.sampling import SamplingInputs
from jaxcache.engine.step_inputs import SequenceSlice
from tests.models.test_llama import Golden

NUM_BLOCKS, BLOCK, LENGTH = 5000, 16, 320
SHARED = np.arange(1, 1 + LENGTH // BLOCK, dtype=np.int32)


@pytest.fixture(scope="module")
def runner():
    golden = Golden("plain")
    return ModelRunner(
        golden.model(),
        golden.config,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        kv_dtype="float32",
        max_model_len=2 * LENGTH,
        buckets=Buckets((16, 32), (1, 4), tile_size=16),
    )


def tables():
    """Four sequences with 320 tokens in common."""
    return [np.append(SHARED, 100 + nth) for nth in range(4)]


def step_of(runner: ModelRunner, num_new_tokens: int):
    slices = [
        SequenceSlice(np.zeros(num_new_tokens if nth == 0 else 1, np.int32), LENGTH, [table])
        for nth, table in enumerate(tables())
    ]
    step = runner._inputs(slices, runner.buckets.fit(num_new_tokens + 3, 4))
    return runner_module._step.lower(runner.graphdef, runner.params, runner.kv, step, None, runner.adapters, None)


def several_steps(runner: ModelRunner):
    rows = [(7, LENGTH + 1, table, LENGTH + 50, ()) for table in tables()]
    seqs = runner._with_runs(sequences(rows, 4, runner._table_width))
    assert seqs.shared is not None
    assert seqs.shared.lengths.max() == LENGTH
    sampling = SamplingInputs.build([SamplingParams()] * 4, [0] * 4, [0] * 4, 4)
    return decode_steps.lower(
        runner.graphdef,
        runner.params,
        runner.adapters,
        runner.kv,
        jax.tree.map(np.asarray, pool.init(NUM_BLOCKS)),
        seqs,
        sampling,
        None,
        implementation=None,
        policy=pool,
        block_size=BLOCK,
        num_steps=4,
    )


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize(
    "lower",
    [
        pytest.param(lambda runner: step_of(runner, 1), id="decodes with a shared run"),
        pytest.param(lambda runner: step_of(runner, 13), id="a prefill beside decodes"),
        pytest.param(several_steps, id="several steps in one call"),
    ],
)
def test_no_call_copies_the_kv_array(runner, lower):
    compiled = lower(runner).compile()
    memory, (array,) = compiled.memory_analysis(), jax.tree.leaves(runner.kv)
    assert memory.alias_size_in_bytes >= array.nbytes
    assert memory.temp_size_in_bytes < array.nbytes / 10
    shape = ",".join(map(str, array.shape))
    made = [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line.split("=")[-1][:200]]
    assert made, "the array's shape should be somewhere"
    assert not [line for line in made if " copy(" in line or " copy-start(" in line]

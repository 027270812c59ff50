"""Wrong block ids and slots are named before a kernel drops them."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcache as jc
from jaxcache.kernels import PAD_SLOT, StepInputs, check_step
from tests.engine.test_families import BUCKETS, load
from tests.kernels.scenes import Scene

SCENE = Scene([(40, 1), (20, 30)], padding=(3, 1, 2), unheld={0: 1})
SIZES = {"num_blocks": SCENE.num_blocks, "block_size": SCENE.block_size}


def altered(field: str, index: int | tuple[int, int], value: int) -> StepInputs:
    array = np.array(getattr(SCENE.step, field))
    array[index] = value
    return SCENE.step._replace(**{field: jnp.asarray(array)})


def test_a_sound_step():
    check_step(SCENE.step, **SIZES)


def test_rows_may_write_nowhere_where_no_block_is_held():
    scene = Scene([(0, 20)], unheld={0: 1})
    slots = jnp.concatenate([jnp.arange(16), scene.step.slot_mapping[16:]])
    check_step(scene.step._replace(slot_mapping=slots), num_blocks=scene.num_blocks, block_size=16)


LAST = SCENE.num_blocks - 1


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            altered("block_tables", (1, 2), LAST + 1),
            rf"block_tables\[1, 2\] is {LAST + 1}, .*0 to {LAST}; 1 ",
        ),
        (altered("block_tables", (2, 0), -1), r"block_tables\[2, 0\] is -1"),
        (
            altered("slot_mapping", 0, 5),
            r"slot_mapping\[0\] is 5, but .* position 40 of sequence 0 is slot",
        ),
        (
            altered("slot_mapping", 3, PAD_SLOT),
            r"slot_mapping\[3\] is 2147483647, .* 22 of sequence 1 is slot",
        ),
        (altered("slot_mapping", 32, 17), "row 32 belongs to no sequence, but has slot 17"),
        (altered("positions", 0, 4000), "row 0 has position 4000, but block tables end at"),
        (altered("positions", 0, -1), "row 0 has position -1"),
        (altered("query_start", 1, 40), "query_start must rise from 0"),
    ],
)
def test_what_is_wrong_is_named(step, message):
    with pytest.raises(ValueError, match=message):
        check_step(step, **SIZES)


def test_two_rows_on_one_slot():
    """Two sequences that write to one block."""
    tables = np.array(SCENE.step.block_tables)
    tables[0, 2] = tables[1, 2]
    slots = np.array(SCENE.step.slot_mapping)
    slots[0] = tables[0, 2] * 16 + 8
    step = SCENE.step._replace(block_tables=jnp.asarray(tables), slot_mapping=jnp.asarray(slots))
    with pytest.raises(ValueError, match=rf"rows \[0, 21\] all write to slot {slots[0]}"):
        check_step(step, **SIZES)


def test_the_engine_checks_its_steps_when_asked_to(monkeypatch):
    model, config = load("qwen3")

    def generate(check_steps):
        engine = jc.Engine(
            model,
            config,
            cache=jc.CacheConfig(block_size=8, num_blocks=60, check_steps=check_steps),
            scheduler=jc.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96),
            buckets=BUCKETS,
        )
        return engine.generate([[1, 2, 3]], jc.SamplingParams(temperature=0.0, max_tokens=2), progress=False)

    sound = generate(True)
    assert sound[0].finish_reason == "length"
    inputs = jc.engine.runner.build_step_inputs

    def wrong(*args, **kwargs):
        return tuple(group._replace(block_tables=group.block_tables + 60) for group in inputs(*args, **kwargs))

    monkeypatch.setattr(jc.engine.runner, "build_step_inputs", wrong)
    with pytest.raises(ValueError, match="block_tables"):
        generate(True)

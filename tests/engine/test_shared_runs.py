"""Decodes that begin with the same blocks: which runs are named, and that naming them changes no answer."""

import numpy as np
import pytest

import jaxcache as jc
from jaxcache.engine import runner, shared_runs, step_inputs
from jaxcache.engine.shared_runs import MAX_RUNS, find_runs
from tests.engine.test_families import BUCKETS, load

BLOCK = 16


def tables(*groups: tuple[int, int], own: int = 3) -> np.ndarray:
    """For each group of `(sequences, shared blocks)` as many rows, each with `own` blocks of its own behind."""
    width, rows, free = max(shared for _, shared in groups) + own + 2, [], 1
    for sequences, shared in groups:
        prefix = list(range(free, free + shared))
        free += shared
        for _ in range(sequences):
            rows.append([*prefix, *range(free, free + own), *[0] * (width - shared - own)])
            free += own
    return np.array(rows, np.int32)


def lengths(block_tables: np.ndarray) -> np.ndarray:
    return (block_tables > 0).sum(axis=1).astype(np.int32) * BLOCK


def members(runs, nth: int) -> list[int]:
    return np.flatnonzero(runs.run == nth).tolist()


def test_all_share():
    given = tables((4, 20))
    runs = find_runs(given, lengths(given), BLOCK)
    assert runs.lengths.tolist() == [320, 0, 0, 0]
    assert runs.tables[0, :20].tolist() == given[0, :20].tolist()
    assert not runs.tables[0, 20:].any()
    assert members(runs, 0) == [0, 1, 2, 3]


def test_several_runs_the_most_saving_first():
    given = tables((2, 20), (3, 30), (1, 20))
    lens = np.minimum(lengths(given), 23 * BLOCK)
    lens[5] = 17
    runs = find_runs(given, lens, BLOCK)
    assert runs.lengths.tolist() == [22 * BLOCK, 20 * BLOCK, 0, 0]  # not the block that the new row goes to
    assert members(runs, 0) == [2, 3, 4]
    assert members(runs, 1) == [0, 1]
    assert members(runs, MAX_RUNS) == [5]


def test_no_more_than_there_is_room_for():
    given = tables((2, 17), *[(4, 40)] * MAX_RUNS, (2, 17))
    runs = find_runs(given, lengths(given), BLOCK)
    assert runs.lengths.tolist() == [640] * MAX_RUNS
    assert members(runs, MAX_RUNS) == [0, 1, 18, 19]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (((4, 15),), "240 tokens are too few"),
        (((1, 40), (1, 40)), "nobody shares"),
        (((2, 20), (30, 0)), "of 32 sequences 30 do not share, and are as long"),
    ],
)
def test_what_does_not_pay(groups, why):
    given = tables(*groups, own=20)
    lens = np.full(len(given), 20 * BLOCK, np.int32) if "long" in why else lengths(given)
    assert not find_runs(given, lens, BLOCK).lengths.any(), why


def test_blocks_no_longer_held_are_not_shared():
    given = tables((4, 40))
    given[:, :20] = 0
    assert not find_runs(given, lengths(given), BLOCK).lengths.any()


def test_padding():
    given = np.concatenate([tables((3, 20)), np.zeros((5, 25), np.int32)])
    runs = find_runs(given, lengths(given), BLOCK)
    assert members(runs, 0) == [0, 1, 2]
    assert not find_runs(np.zeros((4, 8), np.int32), np.zeros(4, np.int32), BLOCK).lengths.any()


@pytest.mark.parametrize(("name", "decode_steps"), [("qwen3", 1), ("qwen3", 3), ("gemma2", 1)])
def test_no_answer_changes(name, decode_steps, monkeypatch):
    monkeypatch.setattr(shared_runs, "MIN_TOKENS", 16)
    monkeypatch.setattr(shared_runs, "MIN_GAIN", 0)
    named = []

    def watched(*given):
        runs = find_runs(*given)
        named.append(runs.lengths.any())
        return runs

    for module in (step_inputs, runner):
        monkeypatch.setattr(module, "find_runs", watched)
    model, config = load(name)
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, config.vocab_size, 41).tolist()
    prompts = [prefix + rng.integers(0, config.vocab_size, size).tolist() for size in (1, 5, 9)]
    answers = []
    for enabled in (False, True):
        engine = jc.Engine(
            model,
            config,
            cache=jc.CacheConfig(block_size=8, num_blocks=80, shared_prefix_attention=enabled),
            scheduler=jc.SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96, decode_steps=decode_steps
            ),
            buckets=BUCKETS,
        )
        outputs = engine.generate(prompts, jc.SamplingParams(temperature=0.0, max_tokens=8), progress=False)
        answers.append([output.token_ids for output in outputs])
        assert any(named) == enabled
    assert answers[0] == answers[1]

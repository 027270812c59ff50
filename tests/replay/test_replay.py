"""Replays against the reference's recorded totals, the sweep and the bound against the replay."""

import gzip
import json
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from jaxcache.cli import main
from jaxcache.replay import clairvoyant_hits, read_trace, replay, sweep
from jaxcache.replay.trace import Trace, TraceRequest, stand_in_tokens

DATA = Path(__file__).parents[1] / "data"
TRACE = read_trace(DATA / "conversation_trace_1000.jsonl.gz")
RECORDED = json.loads((DATA / "replay.json").read_text())["runs"]
RUNS = [run for run in RECORDED if run["requests"] == 300]


def first(n: int) -> Trace:
    return Trace(TRACE.name, TRACE.requests[:n])


def tiny(*prompts: tuple[list[int], int]) -> Trace:
    return Trace("tiny", [TraceRequest(0, length, 0, tuple(ids)) for ids, length in prompts])


@pytest.mark.core
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['block_size']}-{run['pool_blocks']}")
def test_lru_gives_the_reference_hits(run):
    result = replay(first(run["requests"]), block_size=run["block_size"], num_blocks=run["pool_blocks"])
    assert result.hit_tokens == run["hit_tokens"]
    assert result.num_refused == 0


@lru_cache
def hits(policy: str, num_blocks: int) -> int:
    """Of the first 600 requests; kept, since each pool size is compiled anew."""
    return replay(first(600), block_size=512, num_blocks=num_blocks, policy=policy).hit_tokens


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("lru", 0.0), pytest.param("s3fifo", 0.03, marks=pytest.mark.slow)]
)
def test_the_sweep_gives_what_the_replay_gives(policy, tolerance):
    swept = sweep(first(600), block_size=512, num_blocks=[400, 1500], policy=policy)
    np.testing.assert_allclose(swept, [hits(policy, 400), hits(policy, 1500)], rtol=tolerance)
    assert swept[0] < swept[1]


def test_hash_ids_may_be_any_numbers(tmp_path):
    """As small ints of 32 bits, or times the 32 units of 16 tokens, these would come out as others or as none."""
    ids = [5, 2**32 + 5, 1, 2**27 + 1, -1, 2**31 - 1, 2**64, 10**30]
    rows = [json.dumps({"input_length": 513, "hash_ids": [hash_id, 0]}) for hash_id in [*ids, *ids[::-1]]]
    (tmp_path / "trace.jsonl").write_text("\n".join(rows))
    trace = read_trace(tmp_path / "trace.jsonl")
    for block_size in (512, 16):
        hits = replay(trace, block_size=block_size, num_blocks=1000).hit_tokens
        assert hits == len(ids) * 512
        assert sweep(trace, block_size=block_size, num_blocks=[1000]) == [hits]


@pytest.mark.parametrize("num_blocks", [400, pytest.param(1500, marks=pytest.mark.slow)])
def test_the_scan_resistant_policy_loses_nothing(num_blocks):
    assert hits("s3fifo", num_blocks) >= 0.99 * hits("lru", num_blocks)


@pytest.mark.parametrize("num_blocks", [400, 1500])
def test_the_bound_bounds(num_blocks):
    bound = clairvoyant_hits(first(600), block_size=512, num_blocks=num_blocks)
    assert bound >= max(hits(policy, num_blocks) for policy in ("lru", "s3fifo"))


def test_with_room_for_all_the_bound_is_what_lru_hits():
    assert clairvoyant_hits(first(600), block_size=512, num_blocks=10**6) == hits("lru", 20_000)


def test_the_bound_keeps_what_is_needed_first():
    """Room for two blocks: after a, b, c the next is a again, so b goes although a is older."""
    trace = tiny(([1], 513), ([2], 513), ([3], 513), ([1], 513))
    assert clairvoyant_hits(trace, block_size=512, num_blocks=4) == 512
    assert replay(trace, block_size=512, num_blocks=4).hit_tokens == 0


@pytest.mark.parametrize("block_size", [16, 256, 512, 1024])
def test_stand_ins_have_the_blocks_of_the_whole_prompt(block_size):
    for length in (1, 511, 512, 513, 2048, 2049, 3000):
        tokens, size = stand_in_tokens(TraceRequest(0, length, 0, tuple(range(6))), block_size)
        assert len(tokens) // size == length // block_size
        assert (len(tokens) - 1) // size == (length - 1) // block_size
        assert -(-len(tokens) // size) == -(-length // block_size)


def test_a_prompt_that_does_not_fit_is_refused_and_the_next_one_served():
    result = replay(tiny((list(range(9)), 4608), ([1], 513), ([1], 513)), block_size=512, num_blocks=4)
    assert (result.num_refused, result.hit_tokens) == (1, 512)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl:1 is no request"),
        ('{"input_length": 5}', "expected an object with input_length and hash_ids"),
        (
            '{"input_length": 1025, "hash_ids": [1, 2]}',
            "1025 tokens need at least one token and 3 hash_ids of 512, got 2",
        ),
        ('{"input_length": 5, "hash_ids": [[1]]}', "expected an object with input_length and hash_ids"),
        ("", "holds no requests"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "bad.jsonl")


def test_a_gzipped_trace_that_is_cut_off_or_damaged_is_named(tmp_path, capsys):
    contents = gzip.compress(b'{"input_length": 5, "hash_ids": [1]}\n' * 99)
    for damaged in (contents[:-1], contents[:10] + b"\xff" + contents[11:]):
        (tmp_path / "bad.jsonl.gz").write_bytes(damaged)
        assert main(["replay", str(tmp_path / "bad.jsonl.gz")]) == 2
        assert re.search(r"jaxcache: .*bad\.jsonl\.gz is cut off or damaged", capsys.readouterr().err)


def test_a_block_size_that_the_trace_cannot_tell_is_refused():
    with pytest.raises(ValueError, match="block_size 48 neither divides 512 nor is a multiple of it"):
        replay(TRACE, block_size=48, num_blocks=100)


def test_a_pool_smaller_than_a_prompt_cannot_be_swept():
    with pytest.raises(ValueError, match="the longest prompt needs 9 blocks"):
        sweep(tiny((list(range(9)), 4608)), block_size=512, num_blocks=[9, 20])


def test_the_command_prints_a_table_and_writes_json_and_a_plot(tmp_path, capsys):
    trace = str(DATA / "conversation_trace_1000.jsonl.gz")
    options = ["--num-blocks", "400,1500", "--policy", "lru,s3fifo,clairvoyant", "--limit", "60", "--no-progress"]
    written = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert main(["replay", trace, *options, *written]) == 0
    printed = capsys.readouterr().out
    assert "60 requests" in printed
    assert [line.split()[0] for line in printed.splitlines()[3:]] == ["lru", "lru", "s3fifo", "s3fifo"] + 2 * [
        "clairvoyant"
    ]
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["num_blocks"] for row in rows] == 3 * [400, 1500]
    assert all(0 < row["hit_rate"] < 1 for row in rows)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_what_is_wrong(capsys):
    assert main(["replay", "/nowhere.jsonl"]) == 2
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["replay", "x", "--policy", "mru"])
    assert "'mru' is no policy" in capsys.readouterr().err

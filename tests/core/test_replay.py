"""Replays of a public request trace against the reference's recorded hits, block ids and final eviction order."""

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.request import Request
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup

pytestmark = pytest.mark.core
DATA = Path(__file__).parents[1] / "data"
RECORDED = json.loads((DATA / "replay.json").read_text())
TRACE = [
    json.loads(row)
    for row in gzip.decompress((DATA / "conversation_trace_1000.jsonl.gz").read_bytes()).splitlines()
]
RUNS = [run for run in RECORDED["runs"] if run["requests"] <= len(TRACE)]


def expand(hash_ids: list[int], length: int) -> np.ndarray:
    """512 token ids per hash id: splitmix64's finaliser modulo 128,000 (`replay.json` says how)."""
    z = np.asarray(hash_ids, np.uint64)[:, None] * np.uint64(512) + np.arange(512, dtype=np.uint64)
    z += np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    return (z % np.uint64(128_000)).reshape(-1)[:length].astype(np.int32)


def digest(numbers) -> str:
    return hashlib.sha256("\n".join(map(str, numbers)).encode()).hexdigest()


def test_token_expansion():
    prompt = expand(TRACE[0]["hash_ids"], TRACE[0]["input_length"])
    assert digest(prompt) == RECORDED["prompt0_sha256_of_newline_joined_tokens"]


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r['requests']}-{r['pool_blocks']}")
def test_replay_gives_the_reference_hits_and_block_ids(run):
    block_size = run["block_size"]
    manager = KVCacheManager([KVCacheGroup(FullAttentionSpec(block_size))], run["pool_blocks"], 200_000)
    hasher = get_request_block_hasher(block_size)
    hits, last_ids = [], []
    for nth, row in enumerate(TRACE[: run["requests"]]):
        request = Request(str(nth), expand(row["hash_ids"], row["input_length"]), block_hasher=hasher)
        blocks, hit = manager.get_computed_blocks(request)
        new = manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
        hits.append(hit)
        last_ids.append(new.blocks[0][-1])
        manager.free(request)
    assert hits[:20] == run["first_20_hits"]
    assert sum(hits) == run["hit_tokens"]
    assert sum(hit > 0 for hit in hits) == run["requests_with_hit"]
    assert digest(hits) == run["sha256_per_request_hits"]
    assert digest(last_ids) == run["sha256_last_new_block_id_per_request"]
    assert digest(manager.pool.queue()) == run["sha256_final_free_queue_ids"]
    assert len(manager.index) == run["cached_keys_end"]
    manager.check_invariants()

"""The KV-cache manager against recorded operation sequences of the reference, block id for block id."""

import gzip
import json
from pathlib import Path

import pytest

from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.hash_index import HashIndex
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.index import IndexFactory
from jaxcache.core.radix_index import RadixIndex
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.core
SEQUENCES = json.loads(gzip.decompress((Path(__file__).parents[1] / "data/operations.json.gz").read_bytes()))[
    "sequences"
]


def make_spec(group: dict) -> KVCacheSpec:
    size = group["block_size"]
    match group["type"]:
        case "full":
            return FullAttentionSpec(size)
        case "sliding_window":
            return SlidingWindowSpec(size, group["window"])
        case "chunked_local":
            return ChunkedLocalAttentionSpec(size, group["chunk"])
    raise ValueError(group["type"])


class Driver:
    """Does what each recorded operation says, and answers in the recording's terms."""

    def __init__(self, config: dict, index: IndexFactory) -> None:
        self.manager = KVCacheManager(
            [KVCacheGroup(make_spec(group)) for group in config["groups"]],
            config["num_blocks"],
            config["max_model_len"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            enable_caching=config["enable_caching"],
            watermark=config["watermark"],
            index=index,
        )
        self.hasher = None
        if config["enable_caching"]:
            self.hasher = get_request_block_hasher(self.manager.hash_block_size)
        self.requests: dict[str, Request] = {}

    def __call__(self, operation: dict):
        return getattr(self, operation["op"])(operation)

    def add(self, op):
        request = Request(op["id"], op["tokens"], cache_salt=op["salt"], block_hasher=self.hasher)
        self.requests[op["id"]] = request
        return {"num_hashes": len(request.block_hashes)}

    def admit(self, op):
        request = self.requests[op["id"]]
        blocks, hit = self.manager.get_computed_blocks(request)
        n = min(op["chunk"], request.num_tokens - hit)
        new = self.manager.allocate_slots(
            request, n, hit, blocks, full_sequence_must_fit=op["full_sequence_must_fit"]
        )
        if new is not None:
            request.num_computed_tokens = hit + n
            request.status = RequestStatus.RUNNING
        new_ids = None if new is None else new.get_block_ids()
        return {"hit": hit, "hit_ids": blocks.get_block_ids(), "new_ids": new_ids}

    def continue_(self, op):
        request = self.requests[op["id"]]
        n = min(op["chunk"], request.num_tokens - request.num_computed_tokens)
        new = self.manager.allocate_slots(request, n)
        if new is None:
            return {"new_ids": None}
        request.num_computed_tokens += n
        return {"new_ids": new.get_block_ids(), "table": self.manager.get_block_ids(op["id"])}

    def append(self, op):
        self.requests[op["id"]].append_output_token_ids(op["token"])
        return {"num_hashes": len(self.requests[op["id"]].block_hashes)}

    def preempt(self, op):
        request = self.requests[op["id"]]
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1

    def free(self, op):
        self.manager.free(self.requests.pop(op["id"]))

    def reset(self, op):
        return self.manager.reset_prefix_cache()

    def queue(self, op):
        return self.manager.pool.queue().tolist()


setattr(Driver, "continue", Driver.continue_)


def describe(sequence: dict) -> str:
    groups = "+".join(f"{group['type']}{group['block_size']}" for group in sequence["config"]["groups"])
    return f"{groups}-{sequence['config']['num_blocks']}"


@pytest.mark.parametrize("index", [RadixIndex, HashIndex])
@pytest.mark.parametrize("sequence", SEQUENCES, ids=map(describe, SEQUENCES))
def test_operations_give_the_reference_block_ids(sequence, index):
    driver = Driver(sequence["config"], index)
    for nth, operation in enumerate(sequence["ops"]):
        assert driver(operation) == operation["result"], (nth, operation)
        assert driver.manager.pool.num_free == operation["free"], (nth, operation)
        if nth % 8 == 0:
            driver.manager.check_invariants()
    stats = driver.manager.make_prefix_cache_stats()
    assert {name: getattr(stats, name) for name in sequence["stats"]} == sequence["stats"]
    for request in list(driver.requests.values()):
        driver.manager.free(request)
    assert driver.manager.pool.num_free == sequence["config"]["num_blocks"] - 1
    driver.manager.check_invariants()


def test_the_recording_covers_every_operation_and_kind_of_group():
    operations = {op["op"] for sequence in SEQUENCES for op in sequence["ops"]}
    assert operations == {"add", "admit", "continue", "append", "preempt", "free", "reset", "queue"}
    kinds = {group["type"] for sequence in SEQUENCES for group in sequence["config"]["groups"]}
    assert kinds == {"full", "sliding_window", "chunked_local"}
    assert sum(len(sequence["ops"]) for sequence in SEQUENCES) == 15_821

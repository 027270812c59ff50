"""What prefix caching costs the host: look-up, allocation, release, and the work around a step.

Every figure is thread CPU time on one thread, and is also given in calibrators: one calibrator is the time of
`sha256(pickle.dumps((parent, 16 ints, None), 5)).digest()` in a chain, measured in the same run, so that ratios
can be compared between machines. The replays must hit exactly the tokens that the reference hit, or it fails.
Token ids are lists, as the reference was measured, unless the line says that they are numpy arrays.

Below the table: how the cost of a block grows with the pool, and that of a step with the queue; memory; and what a
step of the whole engine costs beside its device call.

Run: python benchmarks/host_path.py [--trace conversation_trace.jsonl]
"""

import argparse
import gzip
import hashlib
import json
import pickle
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxcache import CacheConfig, Engine, SamplingParams
from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.config import SchedulerConfig
from jaxcache.core.hashing import get_request_block_hasher
from jaxcache.core.request import Request, RequestStatus
from jaxcache.core.scheduler import Scheduler
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup
from jaxcache.models.config import ModelConfig
from jaxcache.models.llama import Llama

DATA = Path(__file__).parents[1] / "tests/data"
REFERENCE = {
    "replay, block 16": 3.3,
    "replay, block 512": 15.5,
    "fully cached 32k prompt": 2.3,
    "cold 32k allocation with eviction": 1.15,
    "decode step, 256 requests": 3.5,
}
"""The reference's cost in calibrators, per block or (decode) per request."""


def cpu_us(function: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1e3


def calibrator() -> float:
    """Microseconds."""
    tokens = tuple(range(1000, 1016))

    def chain() -> None:
        parent = b"\0" * 32
        for _ in range(20_000):
            parent = hashlib.sha256(pickle.dumps((parent, tokens, None), 5)).digest()

    return statistics.median(cpu_us(chain) for _ in range(7)) / 20_000


def make_manager(block_size: int, num_blocks: int) -> KVCacheManager:
    manager = KVCacheManager([KVCacheGroup(FullAttentionSpec(block_size))], num_blocks, 1 << 20)
    manager.warmup(256)
    return manager


def expand(hash_ids: list[int], length: int) -> list[int]:
    """512 token ids per hash id, as `tests/data/replay.json` says."""
    z = np.asarray(hash_ids, np.uint64)[:, None] * np.uint64(512) + np.arange(512, dtype=np.uint64)
    z += np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    return (z % np.uint64(128_000)).reshape(-1)[:length].tolist()


def replay(rows: list[dict], block_size: int, num_blocks: int, arrays: bool = False) -> tuple[float, int, int]:
    """(CPU microseconds, blocks, hit tokens) of requests one after another."""
    manager = make_manager(block_size, num_blocks)
    hasher = get_request_block_hasher(block_size)
    total, blocks, hits = 0.0, 0, 0
    for nth, row in enumerate(rows):
        tokens = expand(row["hash_ids"], row["input_length"])
        tokens = np.array(tokens, np.int32) if arrays else tokens
        start = time.thread_time_ns()
        request = Request(str(nth), tokens, block_hasher=hasher)
        found, hit = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - hit, hit, found)
        manager.free(request)
        total += (time.thread_time_ns() - start) / 1e3
        blocks += -(-len(tokens) // block_size)
        hits += hit
    return total, blocks, hits


def cached_prompt(arrays: bool = False) -> float:
    """Take in, look up and touch a fully cached prompt of 32k tokens: microseconds per block."""
    manager = make_manager(16, 10_000)
    tokens = np.arange(32_768, dtype=np.int32) if arrays else list(range(32_768))
    hasher = get_request_block_hasher(16)

    def once(name: str) -> float:
        start = time.thread_time_ns()
        request = Request(name, tokens, block_hasher=hasher)
        found, hit = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - hit, hit, found)
        spent = (time.thread_time_ns() - start) / 1e3
        manager.free(request)
        return spent

    once("cold")
    return statistics.median(once(str(nth)) for nth in range(15)) / 2048


def cold_allocation(num_blocks: int = 10_000, prompt_blocks: int = 2048) -> float:
    """Blocks for an unknown prompt out of a full pool, each evicting a named one: microseconds per block."""
    manager = make_manager(16, num_blocks)
    hasher = get_request_block_hasher(16)
    length = prompt_blocks * 16

    def once(nth: int) -> float:
        first = nth * (length + 16) % (1 << 30)
        request = Request(str(nth), np.arange(first, first + length), block_hasher=hasher)
        found, hit = manager.get_computed_blocks(request)
        if hit:
            raise SystemExit("a prompt that nobody ever sent was found in the cache")
        spent = cpu_us(lambda: manager.allocate_slots(request, request.num_tokens, 0, found))
        manager.free(request)
        return spent

    until_full = num_blocks // prompt_blocks + 2
    for nth in range(until_full):
        once(nth)
    return statistics.median(once(nth) for nth in range(until_full, until_full + 15)) / prompt_blocks


def decode_step(num_requests: int, num_waiting: int = 0) -> float:
    """Plan, commit and append for running requests of one new token each: microseconds per request."""
    manager = make_manager(16, 100_000)
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=1 << 17))
    hasher = get_request_block_hasher(16)
    for nth in range(num_requests + num_waiting):
        tokens = range(nth * 1000, nth * 1000 + 200 + nth % 16)
        scheduler.add_request(Request(str(nth), tokens, max_tokens=10_000, block_hasher=hasher))

    def step() -> None:
        plan = scheduler.schedule()
        scheduler.commit(plan)
        for entry in plan.scheduled:
            entry.request.append_output_token_ids(7)

    step()
    spent = [cpu_us(step) for _ in range(64)]
    for request in list(scheduler.running):
        scheduler.finish(request, RequestStatus.FINISHED_ABORTED)
    return statistics.mean(spent) / num_requests


def memory(num_blocks: int = 100_000) -> tuple[float, float]:
    """Bytes per block of the pool's state, and of the index when prompts of 512 blocks fill it."""
    manager = make_manager(16, num_blocks)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(manager.pool.state)) / num_blocks
    fixed = 9.0  # the back pointers: int32 for run and position, int8 for the group
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for nth in range(num_blocks // 512):
        request = Request(str(nth), np.arange(nth * 8192, (nth + 1) * 8192))
        found, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 8192, 0, found)
        manager.free(request)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return state, fixed + held / len(manager.index)


TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def engine_step(num_requests: int, decode_steps: int = 1) -> tuple[float, float]:
    """Wall-clock microseconds of host work per generated token, and of one whole step, of an engine."""
    config = ModelConfig.from_hf(TINY)
    engine = Engine(
        Llama(config, rngs=nnx.Rngs(0)),
        config,
        cache=CacheConfig(num_blocks=num_requests * 24 + 1),
        scheduler=SchedulerConfig(max_num_seqs=num_requests, decode_steps=decode_steps),
    )
    engine.core.kv.warmup(num_requests)
    device = 0.0

    def timed(function: Callable) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            nonlocal device
            start = time.perf_counter()
            result = jax.block_until_ready(function(*arguments, **options))
            device += time.perf_counter() - start
            return result

        return call

    engine.runner._call = timed(engine.runner._call)
    engine.runner._generate = timed(engine.runner._generate)
    params = SamplingParams(temperature=0.0, max_tokens=300)
    for nth in range(num_requests):
        engine.add_request([nth % 128] * 40, params)
    for _ in range(8):
        engine.step()
    device, tokens = 0.0, 0
    start = time.perf_counter()
    for _ in range(64 // decode_steps):
        tokens += len(engine.step())
    total = time.perf_counter() - start
    for request_id in list(engine.core._requests):
        engine.core.finish(request_id, RequestStatus.FINISHED_ABORTED)
    return 1e6 * (total - device) / tokens, 1e6 * total / (64 // decode_steps)


def load(path: Path | None) -> list[dict]:
    if path is None:
        data = gzip.decompress((DATA / "conversation_trace_1000.jsonl.gz").read_bytes())
        return [json.loads(row) for row in data.splitlines()]
    return [json.loads(row) for row in path.read_text().splitlines()]


def expected_hits(block_size: int, num_blocks: int, num_requests: int) -> int | None:
    recorded = json.loads((DATA / "replay.json").read_text())
    for run in [*recorded["runs"], *recorded["full_trace_totals"]]:
        if (run["block_size"], run["pool_blocks"], run["requests"]) == (block_size, num_blocks, num_requests):
            return run["hit_tokens"]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="the whole trace; by default the 1,000 requests in tests/data")
    arguments = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    rows = load(arguments.trace)

    c = calibrator()
    figures: dict[str, float] = {}
    for block_size, num_blocks in ((16, 100_000), (512, 100_000)):
        spent, blocks, hits = replay(rows, block_size, num_blocks)
        expected = expected_hits(block_size, num_blocks, len(rows))
        if expected is not None and hits != expected:
            raise SystemExit(f"replay at block size {block_size}: {hits} hit tokens, the reference has {expected}")
        figures[f"replay, block {block_size}"] = spent / blocks
    figures["fully cached 32k prompt"] = cached_prompt()
    figures["cold 32k allocation with eviction"] = cold_allocation()
    figures["decode step, 256 requests"] = decode_step(256)
    for block_size in (16, 512):
        spent, blocks, _ = replay(rows, block_size, 100_000, arrays=True)
        figures[f"replay, block {block_size}, numpy"] = spent / blocks
    figures["fully cached 32k prompt, numpy"] = cached_prompt(arrays=True)

    print(f"{platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}; {len(rows)} requests")
    print(f"calibrator: {c:.3f} us\n")
    print(f"{'':36}{'us':>9}{'calibrators':>13}{'reference':>11}{'ratio':>8}")
    for name, us in figures.items():
        reference = REFERENCE[name.removesuffix(", numpy")]
        print(f"{name:36}{us:9.3f}{us / c:13.3f}{reference:11.2f}{reference / (us / c):7.1f}x")

    print("\ncold allocation, us a block, by blocks in the pool:")
    scale = {size: cold_allocation(size, 512) for size in (1_000, 10_000, 100_000, 1_000_000)}
    print("".join(f"{size:>12,}" for size in scale), "\n" + "".join(f"{us:12.3f}" for us in scale.values()))
    print("\nstep of 256 requests, us a request, by requests that wait:")
    queue = {waiting: decode_step(256, waiting) for waiting in (0, 100, 10_000)}
    print("".join(f"{n:>12,}" for n in queue), "\n" + "".join(f"{us:12.3f}" for us in queue.values()))
    pool_bytes, index_bytes = memory()
    print(f"\nmemory per block of 16 tokens: pool {pool_bytes:.0f} bytes, index {index_bytes:.0f}")
    print("\nengine, a tiny model: host work per generated token, and the whole step, us")
    for num_requests in (1, 32, 256):
        for decode_steps in (1, 8):
            host, step = engine_step(num_requests, decode_steps)
            print(f"{num_requests:5} requests, {decode_steps} tokens a call: {host:9.1f}{step:12.1f}")
    print(json.dumps({"calibrator_us": c, **{name: us / c for name, us in figures.items()}}))


if __name__ == "__main__":
    main()

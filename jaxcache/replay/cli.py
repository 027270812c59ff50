"""`jaxcache replay`: what a cache of some size would have saved on a recorded trace."""

import argparse
import time
from functools import partial

import jax

from jaxcache.core.config import EVICTION_POLICIES
from jaxcache.flags import refuse
from jaxcache.replay.bound import clairvoyant_hits
from jaxcache.replay.report import plot, table, write_json
from jaxcache.replay.run import ReplayResult, replay
from jaxcache.replay.sweep import sweep
from jaxcache.replay.trace import Trace, check_block_size, read_trace

BOUND = "clairvoyant"
"""The policy that knows the future: no policy, but a bound to compare with."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "replay", help="replay a request trace on the cache", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("trace", help="JSON lines as Mooncake publishes them, .gz allowed")
    parser.add_argument("--block-size", type=int, default=512, help="tokens; default 512, the trace's own")
    parser.add_argument(
        "--num-blocks", type=sizes, default=[1000, 10_000, 100_000], help="for instance 1k,10k,100k"
    )
    parser.add_argument(
        "--policy", type=policies, default=["lru"], help=f"of {', '.join((*EVICTION_POLICIES, BOUND))}"
    )
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument(
        "--sweep", action="store_true", help="all sizes at once, on arrays (no count of evictions)"
    )
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", help="write hit rate over pool size to this picture")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no bars")
    parser.set_defaults(run=run, refuse=partial(refuse, parser))


def sizes(text: str) -> list[int]:
    """`1k,10k,2M` as numbers."""
    factors = {"k": 1000, "m": 1_000_000}
    numbers = []
    for part in text.lower().split(","):
        digits, factor = (part[:-1], factors[part[-1]]) if part[-1:] in factors else (part, 1)
        if not digits.isdecimal() or int(digits) * factor < 2:
            raise argparse.ArgumentTypeError(f"{part!r} is no pool size: write a number of at least 2, 10k or 2M")
        numbers.append(int(digits) * factor)
    return numbers


def policies(text: str) -> list[str]:
    chosen = text.split(",")
    known = (*EVICTION_POLICIES, BOUND)
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is no policy: choose of {', '.join(known)}")
    return chosen


def run(options: argparse.Namespace) -> None:
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    check_block_size(options.block_size)
    trace = read_trace(options.trace, options.limit)
    results = [result for policy in options.policy for result in _results(trace, policy, options)]
    print(f"{trace.name}: {len(trace.requests):,} requests, {trace.num_tokens:,} prompt tokens")
    print(table(results))
    if options.json:
        write_json(results, options.json)
    if options.plot:
        plot(results, options.plot)


def _results(trace: Trace, policy: str, options: argparse.Namespace) -> list[ReplayResult]:
    size = options.block_size
    if policy == BOUND:
        return [
            _bare(trace, policy, size, n, lambda n=n: clairvoyant_hits(trace, block_size=size, num_blocks=n))
            for n in options.num_blocks
        ]
    if options.sweep:
        began = time.perf_counter()
        hits = sweep(trace, block_size=size, num_blocks=options.num_blocks, policy=policy)
        seconds = (time.perf_counter() - began) / len(hits)
        return [
            ReplayResult(trace.name, policy, size, n, len(trace.requests), 0, trace.num_tokens, hit, 0, seconds)
            for n, hit in zip(options.num_blocks, hits)
        ]
    return [
        replay(trace, block_size=size, num_blocks=n, policy=policy, progress=options.progress)
        for n in options.num_blocks
    ]


def _bare(trace: Trace, policy: str, block_size: int, num_blocks: int, hits) -> ReplayResult:
    began = time.perf_counter()
    found = hits()
    seconds = time.perf_counter() - began
    return ReplayResult(
        trace.name, policy, block_size, num_blocks, len(trace.requests), 0, trace.num_tokens, found, 0, seconds
    )

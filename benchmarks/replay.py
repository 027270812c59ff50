"""Hit rates of the eviction policies on the two public Mooncake traces, beside the clairvoyant bound.

The traces (conversation_trace.jsonl, synthetic_trace.jsonl) are in github.com/kvcache-ai/Mooncake, folder
FAST25-release/traces. On the conversation trace lru must hit exactly the tokens that the reference hits.

Run: python benchmarks/replay.py conversation_trace.jsonl [synthetic_trace.jsonl] [--json out.json] [--no-bound]
"""

import argparse
import json
import time
from pathlib import Path

import jax

from jaxcache.replay import Trace, clairvoyant_hits, read_trace, replay, sweep

BLOCK_SIZE = 512
SIZES = (500, 700, 1000, 2000, 4000, 5859, 8000, 10_000, 20_000, 40_000, 100_000)
REFERENCE = {2000: 8_161_280, 5859: 20_806_144, 10_000: 31_742_976, 20_000: 43_359_232, 100_000: 53_722_112}
"""Hit tokens of the reference's own code on the conversation trace, by pool size."""


def measure(trace: Trace, bound: bool) -> list[dict]:
    """A row per pool size, printed as soon as it is known."""
    print(f"\n{trace.name}, {trace.num_tokens:,} prompt tokens, blocks of {BLOCK_SIZE}")
    print("| blocks | lru | s3fifo | s3fifo / lru | clairvoyant |\n|---|---|---|---|---|", flush=True)
    rows = []
    for size in SIZES:
        hits = {
            policy: replay(trace, block_size=BLOCK_SIZE, num_blocks=size, policy=policy, progress=True).hit_tokens
            for policy in ("lru", "s3fifo")
        }
        if len(trace.requests) == 12_031 and REFERENCE.get(size, hits["lru"]) != hits["lru"]:
            raise SystemExit(f"lru hits {hits['lru']} tokens with {size} blocks, the reference {REFERENCE[size]}")
        if bound:
            hits["clairvoyant"] = clairvoyant_hits(trace, block_size=BLOCK_SIZE, num_blocks=size)
        rows.append({"trace": trace.name, "num_blocks": size, "prompt_tokens": trace.num_tokens} | hits)
        rates = [f"{100 * hits[name] / trace.num_tokens:.2f} %" if name in hits else "" for name in POLICIES]
        ratio = hits["s3fifo"] / hits["lru"]
        print(f"| {size:,} | {rates[0]} | {rates[1]} | {ratio:.3f} | {rates[2]} |", flush=True)
    return rows


POLICIES = ("lru", "s3fifo", "clairvoyant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--json")
    parser.add_argument("--no-bound", dest="bound", action="store_false")
    options = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    rows = []
    for path in options.traces:
        trace = read_trace(path)
        rows += measure(trace, options.bound)
        began = time.perf_counter()
        swept = sweep(trace, block_size=BLOCK_SIZE, num_blocks=SIZES[:-1])
        seconds = time.perf_counter() - began
        exact = swept == [row["lru"] for row in rows[-len(SIZES) : -1]]
        agree = "as above" if exact else f"NOT as above: {swept}"
        print(f"{len(swept)} sizes at once under vmap: {seconds:.1f} s, lru's hits {agree}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

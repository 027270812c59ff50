# ruff: noqa: E402  (libtpu reads its arguments when jax is imported)
"""What the TPU kernels cost, counted without a TPU: final bundles (issue slots in time) per loop, from libtpu.

    python benchmarks/kernel_bundles.py            # measure and print
    python benchmarks/kernel_bundles.py --check    # fail where a count exceeds kernel_bundles.json
    python benchmarks/kernel_bundles.py --write    # measure and make that the new budget

Needs `pip install -e '.[aot]'`. A bundle is what the core issues in one cycle if nothing stalls; waiting for
memory and the number of turns are outside the count, so it ranks two ways of doing the same thing and is no run
time.

The kernel's nest is: tile > walk over its chunks > run of interior chunks. Reported per case, each without the
next: `interior` one interior chunk (512 tokens, the copies of another one included); `general N` any other chunk
with up to N tokens, without the loop that starts copies (10 bundles a block); `tile` start and end of a tile.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DUMP = tempfile.TemporaryDirectory()
os.environ["LIBTPU_INIT_ARGS"] = " ".join(
    [
        f"--xla_jf_dump_to={DUMP.name}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=final.*",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from jaxcache.kernels import KVLayout
from jaxcache.kernels.check.targets import compile_for, devices
from jaxcache.kernels.paged_attention import tpu_kernel
from jaxcache.kernels.paged_attention.tpu_attend import LANES
from jaxcache.kernels.paged_attention.tpu_ring import TileRefs
from jaxcache.kernels.tuning import tpu_tuning

BUDGET = Path(__file__).with_suffix(".json")
TARGETS = ("v5e", "v6e", "tpu7x")
TILES, BLOCKS, LAYERS, SEQUENCES, TABLE_WIDTH = 16, 1024, 4, 64, 512


@dataclass(frozen=True)
class Case:
    tile_rows: int
    """Query tokens per tile; 1: decode, with the KV write."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    members: int | None = None
    """Decodes that attend to a run of blocks together; without a write."""

    @property
    def writes(self) -> bool:
        return self.tile_rows == 1 and self.members is None


CASES = {
    "prefill": Case(32),
    "prefill, 64 rows": Case(64),
    "prefill 9/3 x 64": Case(32, heads=9, kv_heads=3, head_dim=64),
    "prefill, window": Case(32, window=1024),
    "prefill, soft cap": Case(32, cap=50.0),
    "prefill, sinks": Case(32, sinks=True),
    "prefill, float8_e4m3fn": Case(32, kv_dtype="float8_e4m3fn"),
    "prefill, int8": Case(32, kv_dtype="int8"),
    "shared run, 64 decodes": Case(1, members=64),
    "decode": Case(1),
    "decode 9/3 x 64": Case(1, heads=9, kv_heads=3, head_dim=64),
    "decode, blocks of 64": Case(1, block_size=64),
    "decode, window": Case(1, window=1024),
    "decode, soft cap": Case(1, cap=50.0),
    "decode, sinks": Case(1, sinks=True),
    "decode, float8_e4m3fn": Case(1, kv_dtype="float8_e4m3fn"),
    "decode, int8": Case(1, kv_dtype="int8"),
}


def measure(target: str, case: Case) -> dict[str, int]:
    """The counts of one case, see the module's docstring."""
    tuning = tpu_tuning(devices(target)[0].device_kind)
    decode = case.writes
    sizes = tuning.decode_sizes if decode else tuning.prefill_sizes
    plan = tpu_kernel.Plan(
        tile_rows=case.tile_rows,
        chunk=tuning.chunk,
        sizes=sizes,
        tiles_per_program=tuning.decode_tiles if decode else 1,
        row_sum="lanes" if decode else tuning.row_sum,
        depth=0 if decode else tuning.depth,
        stacked_heads=tuning.stacked_heads if decode else 0,
        window=case.window,
        cap=case.cap,
        log_sums=case.members is not None,
    )
    # Each size is code of its own, one of which runs: compiled alone, so that the others are not counted with it.
    alone = {size: loops(target, case, replace(plan, sizes=(size,))) for size in sizes}
    interior, _, tile = alone[sizes[-1]]
    return {"interior": interior, **{f"general {size}": found[1] for size, found in alone.items()}, "tile": tile}


def loops(target: str, case: Case, plan: tpu_kernel.Plan) -> tuple[int, int, int]:
    """Bundles of the interior loop, of the walk around it, and of the tile around that."""
    before = set(Path(DUMP.name).iterdir())
    tiles, kv, kv_scales, others = operands(case)

    def run(tiles, kv, kv_scales, others):
        inputs = others._replace(kv=kv, kv_scales=kv_scales)
        out = jnp.bfloat16 if case.members is None else jnp.float32
        return tpu_kernel.call(tiles, inputs, plan, out, jnp.bfloat16, name="kernel_bundles")

    compile_for(target, run, tiles, kv, kv_scales, others, donate=(1, 2) if case.writes else ())
    dumped = [path for path in Path(DUMP.name).iterdir() if path not in before]
    name = re.compile(r"\d+-kernel_bundles.*-\d+-final_bundles\.txt")
    (text,) = [path.read_text(errors="ignore") for path in dumped if name.fullmatch(path.name)]
    for path in dumped:
        if path.is_file():
            path.unlink()
    found = list(loop_bundles(text))
    inner = max((i for i, (depth, _) in enumerate(found) if depth == deepest(found)), key=lambda i: found[i][1])
    return found[inner][1], enclosing(found, inner, 1), enclosing(found, inner, 2)


def operands(case: Case) -> tuple[Any, Any, Any, tpu_kernel.Inputs]:
    """Tiles, KV, its scales and the other inputs, as shapes."""

    def shape(*dims, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    layout = KVLayout(case.kv_heads, case.head_dim, case.block_size)
    group, decode, int8 = case.heads // case.kv_heads, case.writes, case.kv_dtype == "int8"
    rows = -(-group // 8) * 8 if decode else group * (case.members or case.tile_rows)
    per_tile = shape(TILES, dtype="int32")
    first_block = None if case.window is None else per_tile
    tiles = TileRefs(shape(1, dtype="int32"), shape(1, dtype="int32"), per_tile, per_tile, per_tile, first_block)
    pool = (LAYERS, BLOCKS * 16 // case.block_size)
    new_shape = (TILES, case.kv_heads, layout.planes, 1, layout.lanes)
    others = tpu_kernel.Inputs(
        q=shape(TILES, case.kv_heads, rows, layout.lanes),
        new=shape(*new_shape, dtype=case.kv_dtype) if decode else None,
        new_scales=shape(TILES, *layout.scale_shape, dtype="float32") if decode and int8 else None,
        sinks=shape(case.kv_heads, rows, LANES, dtype="float32") if case.sinks else None,
        tables=shape(SEQUENCES, TABLE_WIDTH, dtype="int32"),
        kv=None,
        kv_scales=None,
    )
    scales = shape(*pool, *layout.scale_shape, dtype="float32") if int8 else None
    return tiles, shape(*pool, *layout.block_shape, dtype=case.kv_dtype), scales, others


BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*((?:>\s*)*)\{")


def loop_bundles(text: str) -> Iterator[tuple[int, int]]:
    """`(depth, bundles of its own)` of each loop of a dump of final bundles, in order.

    A line of the dump is a bundle; `LB` marks the first one of a loop and `>` the depth. Some bundles within a
    loop lack the mark, so that a loop reaches from its `LB` to the last mark of its depth before the next loop
    beside it.
    """
    lines = [(match[2].count(">"), match[1]) for match in map(BUNDLE.match, text.splitlines()) if match]
    starts = [i for i, (_, label) in enumerate(lines) if label == "LB"]
    owner: list[int | None] = [None] * len(lines)
    for nth, start in enumerate(starts):
        depth = lines[start][0]
        limit = next((later for later in starts[nth + 1 :] if lines[later][0] <= depth), len(lines))
        end = max(i for i in range(start, limit) if lines[i][0] >= depth)
        owner[start : end + 1] = [nth] * (end + 1 - start)  # inner loops come later and take over
    for nth, start in enumerate(starts):
        yield lines[start][0], owner.count(nth)


def deepest(found: list[tuple[int, int]]) -> int:
    """The depth of the biggest loop without a loop inside: the copy loops beside it are small."""
    leaves = [i for i in range(len(found)) if i + 1 == len(found) or found[i + 1][0] <= found[i][0]]
    return found[max(leaves, key=lambda i: found[i][1])][0]


def enclosing(found: list[tuple[int, int]], inner: int, levels: int) -> int:
    """Bundles of the loop `levels` above loop `inner`."""
    depth = found[inner][0] - levels
    return next(found[i][1] for i in range(inner, -1, -1) if found[i][0] == depth)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a count exceeds the budget")
    parser.add_argument("--write", action="store_true", help="write the counts as the new budget")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    options = parser.parse_args()
    if options.write and (options.target or options.case):
        parser.error("--write measures everything: leave out --target and --case")
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    counts: dict[str, dict[str, dict[str, int]]] = {}
    grown = 0
    for target in options.target or TARGETS:
        for name in options.case or CASES:
            found = measure(target, CASES[name])
            counts.setdefault(target, {})[name] = found
            allowed = budget.get(target, {}).get(name, {})
            more = {part: n - allowed[part] for part, n in found.items() if part in allowed and n > allowed[part]}
            grown += len(more)
            notes = "".join(f"  {part} +{n}" for part, n in more.items())
            print(f"{target:6} {name:24} " + "  ".join(f"{k} {v}" for k, v in found.items()) + notes, flush=True)
    if options.write:
        BUDGET.write_text(json.dumps(counts, indent=1) + "\n")
    if options.check and grown:
        print(f"{grown} counts exceed {BUDGET.name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Decode attention of many sequences over one long prefix: block tables as they are, against the shared run named.

    python benchmarks/shared_prefix.py [--own 64] [--shape NAME]

One call of the XLA backend for one layer, f32, least of several runs. The output of both is the same to rounding.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxcache.engine.shared_runs import find_runs
from jaxcache.kernels import KVLayout, StepInputs, init_kv, make_tiles
from jaxcache.kernels.paged_attention import paged_attention
from jaxcache.kernels.paged_attention.shapes import SHAPES, AttentionShape

BLOCK_SIZE = 16
REPEATS = 5


def make_step(sequences: int, prefix: int, own: int) -> StepInputs:
    """Sequences whose tables begin with the same `prefix` tokens and go on with `own` tokens each."""
    shared = np.arange(1, prefix // BLOCK_SIZE + 1, dtype=np.int32)
    rest = -(-own // BLOCK_SIZE)
    ids = 1 + len(shared) + np.random.default_rng(0).permutation(sequences * rest).astype(np.int32)
    tables = np.concatenate([np.tile(shared, (sequences, 1)), ids.reshape(sequences, rest)], axis=1)
    lens = np.full(sequences, prefix + own, np.int32)
    start = np.arange(sequences + 1, dtype=np.int32)
    slots = tables[:, (prefix + own - 1) // BLOCK_SIZE] * BLOCK_SIZE + (prefix + own - 1) % BLOCK_SIZE
    zeros, tiles = np.zeros(sequences, np.int32), make_tiles(start, lens, 128, 0)
    return StepInputs(zeros, lens - 1, slots, tables, lens, start, start[:-1], tiles)  # pyright: ignore


def milliseconds(shape: AttentionShape, step: StepInputs, num_blocks: int) -> tuple[float, np.ndarray]:
    key = jax.random.key(0)
    q = jax.random.normal(key, (len(step.seq_lens), shape.heads, shape.head_dim))
    kv = init_kv(KVLayout(shape.kv_heads, shape.head_dim, BLOCK_SIZE), 1, num_blocks, jnp.float32)
    kv = kv._replace(data=jax.random.normal(key, kv.data.shape))
    attend = jax.jit(functools.partial(paged_attention, layer=0))
    step = jax.tree.map(jnp.asarray, step)
    out = jax.block_until_ready(attend(q, kv, step=step))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(attend(q, kv, step=step))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times), np.asarray(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", type=int, default=64, help="tokens of each sequence behind the prefix")
    parser.add_argument("--shape", choices=SHAPES, default="SmolLM2-135M")
    own, shape = (options := parser.parse_args()).own, SHAPES[options.shape]
    print(f"{options.shape}, blocks of {BLOCK_SIZE}, {own} own tokens, {jax.devices()[0].device_kind}")
    print("sequences  prefix  as they are  shared  faster")
    for sequences in (2, 4, 8, 32, 64):
        for prefix in (256, 1024, 4096):
            step = make_step(sequences, prefix, own)
            num_blocks = int(step.block_tables.max()) + 1
            plain, expected = milliseconds(shape, step, num_blocks)
            runs = find_runs(np.asarray(step.block_tables), np.asarray(step.seq_lens), BLOCK_SIZE)
            shared, found = milliseconds(shape, step._replace(shared=runs), num_blocks)
            np.testing.assert_allclose(found, expected, atol=2e-6)
            times = f"{plain:8.2f} ms  {shared:6.2f} ms  {plain / shared:.1f}x"
            print(f"{sequences:9}  {prefix:6}  {times}", flush=True)


if __name__ == "__main__":
    main()

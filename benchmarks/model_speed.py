"""Prefill, decode and time to first token of a Llama of SmolLM2-135M's shape, next to torch where it is installed.

    python benchmarks/model_speed.py [--rounds 5] [--lengths 512,1024,2048] [--no-torch]

Weights are random: speed does not depend on them. All contestants take turns within each round, in one process,
with as many threads each, so that what else the machine does strikes all alike. (Not quite: where other programs
keep every core busy, torch's threads wait for each other far longer than ours. Measure on a quiet machine.) A time
is the median over the rounds, a ratio the median of the rounds' ratios. torch runs the same shape as transformers'
`LlamaForCausalLM` in f32 (`pip install torch==2.13.0 transformers`). Prints a table and one line of JSON.

"First token" is through the engine, which pads 1,056 tokens to a step of 2,048; "bare step" is the model alone on
exactly as many rows as there are.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

CONFIG = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
BLOCK_SIZE = 16
TILE_SIZE = 128
DECODE_CONTEXT = 1024
DECODE_STEPS = 8
CACHED, NEW = 1024, 32

Measurement = Callable[[], float]


class Ours:
    """One sequence over blocks that lie in descending order."""

    def __init__(self, longest: int) -> None:
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from jaxcache.kernels import KVLayout, init_kv
        from jaxcache.models.config import ModelConfig
        from jaxcache.models.llama import Llama

        config = ModelConfig.from_hf(CONFIG)
        self.model = Llama(config, rngs=nnx.Rngs(0))
        graph, self.params = nnx.split(self.model)
        self.num_blocks = -(-longest // BLOCK_SIZE) + 2
        layout = KVLayout(config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        self.kv = init_kv(layout, config.num_layers, self.num_blocks, jnp.float32)

        def forward(params: Any, kv: Any, step: Any) -> tuple[Any, Any]:
            model = nnx.merge(graph, params)
            hidden, kv = model(step, kv)
            return model.logits(hidden[step.logits_rows]).argmax(-1), kv

        self.forward = jax.jit(forward, donate_argnames="kv")

    def step(self, before: int, new: int) -> Any:
        """Inputs of one step that computes `new` tokens behind `before`."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jaxcache.kernels import StepInputs, make_tiles

        blocks = np.arange(self.num_blocks - 1, 0, -1, dtype=np.int32)
        positions = before + np.arange(new, dtype=np.int32)
        query_start, seq_lens = np.array([0, new], np.int32), np.array([before + new], np.int32)
        slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        tiles = make_tiles(query_start, seq_lens, TILE_SIZE, 0 if new == 1 else new // TILE_SIZE + 1)
        return StepInputs(
            token_ids=jnp.arange(new, dtype=jnp.int32) % CONFIG["vocab_size"],
            positions=jnp.asarray(positions),
            slot_mapping=jnp.asarray(slots),
            block_tables=jnp.asarray(blocks)[None],
            seq_lens=jnp.asarray(seq_lens),
            query_start=jnp.asarray(query_start),
            logits_rows=jnp.array([new - 1]),
            tiles=jax.tree.map(jnp.asarray, tiles),
        )

    def run(self, step: Any) -> None:
        token, self.kv = self.forward(self.params, self.kv, step)
        token.block_until_ready()


class FirstToken:
    """Time to first token through the engine as it comes: hashing, planning, padding to a bucket, sampling."""

    def __init__(self, model: Any) -> None:
        import numpy as np

        from jaxcache import CacheConfig, Engine, SamplingParams

        self.engine = Engine(model, model.config, cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=160))
        self.params = SamplingParams(temperature=0.0, max_tokens=1)
        self.random = np.random.default_rng(0)
        self.shared = self.random.integers(0, CONFIG["vocab_size"], CACHED).tolist()

    def cold(self) -> float:
        self.engine.reset_prefix_cache()
        return self.ask(cached=0)

    def cached(self) -> float:
        """Right after `cold`."""
        return statistics.median(self.ask(cached=CACHED) for _ in range(5))

    def ask(self, cached: int) -> float:
        prompt = self.shared + self.random.integers(0, CONFIG["vocab_size"], NEW).tolist()
        output = self.engine.generate(prompt, self.params)[0]
        if output.num_cached_tokens != cached:
            raise SystemExit(f"{output.num_cached_tokens} tokens came from the cache, expected {cached}")
        return output.time_to_first_token or 0.0


class Torch:
    """transformers with its dynamic cache and its default attention."""

    def __init__(self, threads: int) -> None:
        # With the checkout on the path, transformers takes its link `kernels` for the package of that name.
        sys.modules.setdefault("kernels", cast(Any, None))
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))

        torch.set_num_threads(threads)
        self.torch, self.new_cache = torch, transformers.DynamicCache
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}

    def run(self, new: int, cache: Any = None) -> Any:
        """Compute `new` tokens behind those in `cache`, and the next one."""
        with self.torch.inference_mode():
            tokens = self.torch.arange(new)[None] % CONFIG["vocab_size"]
            cache = self.new_cache() if cache is None else cache
            self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return cache


def clock(call: Callable[[], Any], turns: int = 1) -> float:
    """Seconds per turn."""
    start = time.perf_counter()
    for _ in range(turns):
        call()
    return (time.perf_counter() - start) / turns


def measurements(ours: Ours, torch: Torch | None, lengths: list[int]) -> dict[tuple[str, str], Measurement]:
    """`(who, what)` -> one measurement, in seconds. The two of a ratio stand next to each other."""
    steps = {f"prefill {n}": ours.step(0, n) for n in lengths}
    steps |= {"cold start": ours.step(0, CACHED + NEW), "cached start": ours.step(CACHED, NEW)}
    decode = ours.step(DECODE_CONTEXT, 1)
    result: dict[tuple[str, str], Measurement] = {}
    for what, step in steps.items():
        result["jaxcache", what] = lambda step=step: clock(lambda: ours.run(step))
        if torch is not None and what.startswith("prefill"):
            new = len(step.token_ids)
            result["torch", what] = lambda new=new: clock(lambda: torch.run(new))
    result["jaxcache", "decode"] = lambda: clock(lambda: ours.run(decode), DECODE_STEPS)
    if torch is not None:
        cache = torch.run(DECODE_CONTEXT)

        def torch_decode() -> float:
            seconds = clock(lambda: torch.run(1, cache), DECODE_STEPS)
            cache.crop(-DECODE_STEPS)
            return seconds

        result["torch", "decode"] = torch_decode
    first = FirstToken(ours.model)
    result["engine", "cold start"] = first.cold
    result["engine", "cached start"] = first.cached
    return result


def machine() -> str:
    """Processor and core count, as the system tells them."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = (line for line in info.read_text().splitlines() if line.startswith("model name"))
        name = next(models, f":{name}").split(":")[1].strip()
    return f"{name}, {os.cpu_count()} cores"


def figures_of(seconds: dict[tuple[str, str], list[float]], lengths: list[int]) -> dict[str, float]:
    """Medians, and medians of ratios of the same round."""
    middle = {key: statistics.median(values) for key, values in seconds.items()}

    def ratio(slow: tuple[str, str], fast: tuple[str, str]) -> float:
        return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast]))

    figures = {}
    for who in dict.fromkeys(who for who, what in seconds if what == "decode"):
        figures |= {f"{who}_prefill_{n}_tokens_per_s": n / middle[who, f"prefill {n}"] for n in lengths}
        figures[f"{who}_decode_ms"] = middle[who, "decode"] * 1e3
    for who, name in (("jaxcache", "step"), ("engine", "ttft")):
        figures[f"{name}_cold_ms"] = middle[who, "cold start"] * 1e3
        figures[f"{name}_cached_ms"] = middle[who, "cached start"] * 1e3
        figures[f"{name}_ratio"] = ratio((who, "cold start"), (who, "cached start"))
    for who, what in seconds:
        if who == "torch":
            figures[f"{what.replace(' ', '_')}_speedup"] = ratio(("torch", what), ("jaxcache", what))
    return figures


def print_table(figures: dict[str, float], lengths: list[int]) -> None:
    """What a person reads; a dash where torch did not run."""

    def cell(name: str, unit: str, digits: int = 0) -> str:
        return f"{figures[name]:.{digits}f} {unit}".strip() if name in figures else "-"

    rows = [["", "jaxcache", "torch", "ratio"]]
    for n in lengths:
        names = [f"{who}_prefill_{n}_tokens_per_s" for who in ("jaxcache", "torch")]
        cells = [cell(name, "tokens/s") for name in names]
        rows.append([f"prefill of {n}", *cells, cell(f"prefill_{n}_speedup", "", 2)])
    cells = [cell(f"{who}_decode_ms", "ms", 1) for who in ("jaxcache", "torch")]
    rows.append([f"decode at {DECODE_CONTEXT}", *cells, cell("decode_speedup", "", 2)])
    for name, what in (("ttft", "first token"), ("step", "bare step")):
        rows.append([f"{what} of {CACHED + NEW}", cell(f"{name}_cold_ms", "ms", 1), "", ""])
        rows.append(
            [f"{what}, {CACHED} cached", cell(f"{name}_cached_ms", "ms", 1), "", cell(f"{name}_ratio", "", 1)]
        )
    for label, *cells in rows:
        print(f"{label:24}{cells[0]:>16}{cells[1]:>16}{cells[2]:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch; JAX takes every core")
    parser.add_argument("--lengths", default="512,1024,2048", help="prompt lengths, with commas between")
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import jax

    ours = Ours(max(*lengths, CACHED + NEW))
    torch = None if args.no_torch else Torch(args.threads)
    calls = measurements(ours, torch, lengths)
    for call in calls.values():
        call()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for nth in range(args.rounds):
        for key, call in calls.items():
            seconds[key].append(call())
        print(f"round {nth + 1} of {args.rounds}", file=sys.stderr)
    figures = figures_of(seconds, lengths)
    versions = {"jax": jax.__version__, **(torch.versions if torch else {})}
    print(f"{machine()}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    print_table(figures, lengths)
    print(json.dumps({"machine": machine(), **versions, **figures}))


if __name__ == "__main__":
    main()

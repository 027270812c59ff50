"""Attention shapes of real models, for tests, benchmarks and tuning: what one device sees of one layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """Of the layers that have one; the others of the model are alike but for that."""
    sinks: bool = False


SHAPES = {
    "SmolLM2-135M": AttentionShape(9, 3, 64),
    "Llama-3-8B": AttentionShape(32, 8, 128),
    "Llama-3-70B, 1 of 8 devices": AttentionShape(8, 1, 128),
    "Qwen2-0.5B": AttentionShape(14, 2, 64),
    "Qwen3-8B": AttentionShape(32, 8, 128),
    "Gemma-3-1B": AttentionShape(4, 1, 256, sliding_window=512),
    "Gemma-3-27B": AttentionShape(32, 16, 128, sliding_window=1024),
    "gpt-oss-20b": AttentionShape(64, 8, 64, sliding_window=128, sinks=True),
}
"""From the models' published configurations."""

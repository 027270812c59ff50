"""A GGUF file's metadata as the `config.json` that Hugging Face would have for the model."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxcache.models.loading.gguf_file import GGUFFile, expand

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}
"""`general.architecture` -> Hugging Face's `architectures[0]` and `model_type`."""

MIXTRAL = ("MixtralForCausalLM", "mixtral")
"""What `llama` with experts is."""

ROPE_FACTORS = "rope_freqs.weight"

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The same in every Llama 3.1, 3.2 and 3.3; a GGUF keeps only the factors that follow from it."""

LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, which scale attention by the width per head and not by the head's own. GGUF does not
say so; llama.cpp too tells them by their layers.
"""


def read_config(file: GGUFFile) -> dict[str, Any]:
    """A `ValueError` for an architecture that is not supported, a `KeyError` for metadata that is missing."""
    metadata = file.metadata
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    facts = {
        name.removeprefix(f"{architecture}."): value
        for name, value in metadata.items()
        if name.startswith(f"{architecture}.")
    }
    class_name, model_type = ARCHITECTURES[architecture]
    if architecture == "llama" and facts.get("expert_count", 0):
        class_name, model_type = MIXTRAL
    elif facts.get("expert_count", 0) and model_type not in SPECIAL:
        raise ValueError(f"{architecture} with a mixture of experts is not supported; take a dense model")
    own = SPECIAL[model_type](_Facts(architecture, facts)) if model_type in SPECIAL else {}
    return {"architectures": [class_name], "model_type": model_type, **_common(file, architecture), **own}


class _Facts(dict[str, Any]):
    """Metadata of one architecture, without its prefix; what is missing is named with it."""

    def __init__(self, architecture: str, facts: Mapping[str, Any]) -> None:
        super().__init__(facts)
        self.architecture = architecture

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{self.architecture}.{name}")


def _common(file: GGUFFile, architecture: str) -> dict[str, Any]:
    metadata = file.metadata
    heads = metadata[f"{architecture}.attention.head_count"]
    kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise ValueError("a number of heads that differs from layer to layer is not supported")
    width = metadata[f"{architecture}.embedding_length"]
    head_dim = metadata.get(f"{architecture}.attention.key_length", width // heads)
    rotated = metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"RoPE over {rotated} of {head_dim} dimensions of a head is not supported, only over all")
    return {
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": metadata.get(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": metadata[f"{architecture}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(metadata[f"{architecture}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get(f"{architecture}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, architecture, head_dim),
        "max_position_embeddings": metadata[f"{architecture}.context_length"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _gemma(facts: _Facts) -> dict[str, Any]:
    layers, head_dim = facts["block_count"], facts["attention.key_length"]
    largest = layers == LARGEST_GEMMA[facts.architecture]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": facts["embedding_length"] // facts["attention.head_count"]
        if largest
        else head_dim,
        "sliding_window": facts["attention.sliding_window"],
        "attn_logit_softcapping": _shortest_or_none(facts.get("attn_logit_softcapping")),
        "final_logit_softcapping": _shortest_or_none(facts.get("final_logit_softcapping")),
        **_pattern(facts),
    }


def _gemma3(facts: _Facts) -> dict[str, Any]:
    return {**_gemma(facts), "rope_local_base_freq": _shortest(facts.get("rope.freq_base_swa", 10000.0))}


def _gpt_oss(facts: _Facts) -> dict[str, Any]:
    inner = facts["expert_feed_forward_length"]
    scaling = {
        "rope_type": "yarn",
        "factor": _shortest(facts["rope.scaling.factor"]),
        "original_max_position_embeddings": facts["rope.scaling.original_context_length"],
        # Not said in the file; what the models were trained with.
        "truncate": False,
    }
    return {
        **_experts(facts, "num_local_experts"),
        "intermediate_size": inner,
        "sliding_window": facts["attention.sliding_window"],
        "rope_scaling": scaling,
        **_pattern(facts),
    }


def _qwen3_moe(facts: _Facts) -> dict[str, Any]:
    """Whether a token's weights are normalised is not said; they are in every Qwen3."""
    inner = facts["expert_feed_forward_length"]
    dense = facts.get("feed_forward_length", inner)
    return {
        **_experts(facts, "num_experts"),
        "intermediate_size": dense,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
    }


def _mixtral(facts: _Facts) -> dict[str, Any]:
    return _experts(facts, "num_local_experts")


def _experts(facts: _Facts, name: str) -> dict[str, Any]:
    return {name: facts["expert_count"], "num_experts_per_tok": facts["expert_used_count"]}


def _pattern(facts: _Facts) -> dict[str, Any]:
    """Which layers have windows, where the file says so: for each, or every how many there is one without."""
    pattern = facts.get("attention.sliding_window_pattern")
    if pattern is None:
        return {}
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in range(facts["block_count"])]
    return {"layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern]}


SPECIAL: dict[str, Callable[[_Facts], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}
"""By model_type, entries that others do not have."""


def _shortest_or_none(value: float | None) -> float | None:
    return None if value is None else _shortest(value)


def _shortest(value: float) -> float:
    """A float32 as the decimal it was written from: 1e-5, not 9.99999974737875e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, architecture: str, head_dim: int) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`. Llama 3's is stored as one factor per frequency, and recognised from them."""
    metadata = file.metadata
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        factors = expand(file, ROPE_FACTORS)
        theta = metadata.get(f"{architecture}.rope.freq_base", 10000.0)
        scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_ROPE}
        if not np.allclose(factors, llama3_rope_factors(scaling, theta, head_dim), rtol=1e-3):
            raise ValueError(
                f"{ROPE_FACTORS} holds other factors than Llama 3's RoPE scaling, which is all that is known"
            )
        return scaling
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata[f"{architecture}.rope.scaling.factor"]}
    original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    return scaling if original is None else {**scaling, "original_max_position_embeddings": original}


def llama3_rope_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """What Llama 3.1 divides each of its `head_dim / 2` RoPE frequencies by: 1 for short waves, `factor` for long
    ones, in between a blend of the two frequencies.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    waves_per_context = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = np.clip((waves_per_context - low) / (high - low), 0.0, 1.0)
    return 1.0 / (blend + (1.0 - blend) / scaling["factor"])

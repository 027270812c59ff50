"""Reading `config.json` family by family: what an absent entry means there, and what its names mean here.

Each reader returns fields of `ModelConfig` beyond those that all families name alike; whoever calls it checks
them. Defaults are those of transformers' config classes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxcache.models.grouping import FULL, RECURRENT, LayerKind
from jaxcache.models.rope import RopeConfig

Config = Mapping[str, Any]
Fields = dict[str, Any]

LAYER_TYPES = ("full_attention", "sliding_attention")


def base_architecture(model_type: Any) -> str:
    """What Hugging Face calls the model without a head: `Qwen3Model`."""
    return str(model_type).title().replace("_", "") + "Model"


def _get(config: Config, name: str, default: Any) -> Any:
    """`config[name]`, where neither absence nor null stands for another value."""
    value = config.get(name)
    return default if value is None else value


def _positive(config: Config, name: str, default: int) -> Any:
    """A number that is reckoned with here."""
    value = _get(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return value


def _common(config: Config, *, head_dim: int | None = None, eps: float = 1e-6, theta: float = 10000.0) -> Fields:
    """What families whose layers are Llama's share; `head_dim` None follows from the width."""
    heads = config["num_attention_heads"]
    if config.get("head_dim") is not None:
        head_dim = config["head_dim"]
    rope = RopeConfig.from_hf(config, theta)
    return {
        "num_kv_heads": _get(config, "num_key_value_heads", heads),
        "head_dim": _share(config["hidden_size"], heads) if head_dim is None else head_dim,
        "max_position": _max_position(config, rope),
        "norm_eps": _get(config, "rms_norm_eps", eps),
        "activation": _get(config, "hidden_act", "silu"),
        "tie_embeddings": _get(config, "tie_word_embeddings", False),
        "rope": rope,
    }


def _max_position(config: Config, rope: RopeConfig) -> Any:
    """With YaRN the config may still have the context as it was before that stretched it."""
    trained = _positive(config, "max_position_embeddings", 2048)
    return max(trained, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else trained


def _share(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    return hidden // heads


def _window(config: Config, default: int | None) -> LayerKind:
    """The kind of a windowed layer; full attention where the config's window is null."""
    window = config.get("sliding_window", default)
    return FULL if window is None else LayerKind("sliding_window", window)


def _kinds(config: Config, window: LayerKind, default: Callable[[int], bool]) -> tuple[LayerKind, ...]:
    """By `layer_types`, else a window where `default(layer)` says so."""
    types: Sequence[str] | None = config.get("layer_types")
    if types is None:
        windowed = [default(layer) for layer in range(config["num_hidden_layers"])]
    else:
        strange = sorted(set(types) - set(LAYER_TYPES))
        if strange:
            raise ValueError(f"layer_types {strange} are not supported: only {', '.join(LAYER_TYPES)}")
        windowed = [name == "sliding_attention" for name in types]
    return tuple(window if it else FULL for it in windowed)


def _llama(config: Config) -> Fields:
    bias = _get(config, "attention_bias", False)
    return {
        **_common(config),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": _get(config, "mlp_bias", False),
    }


def _qwen_kinds(config: Config) -> tuple[LayerKind, ...]:
    """Windows only where `use_sliding_window` says so; `sliding_window` alone does nothing."""
    window = _window(config, 4096) if _get(config, "use_sliding_window", False) else FULL
    first = config.get("max_window_layers", 28)
    return _kinds(config, window, lambda layer: layer >= first)


def _qwen2(config: Config) -> Fields:
    return {**_common(config), "qkv_bias": True, "layer_kinds": _qwen_kinds(config)}


def _qwen3(config: Config) -> Fields:
    bias = _get(config, "attention_bias", False)
    return {
        **_common(config, head_dim=128),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "layer_kinds": _qwen_kinds(config),
    }


def _qwen3_moe(config: Config) -> Fields:
    if _get(config, "decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ValueError(
            "qwen3_moe with dense layers between those with experts (decoder_sparse_step, mlp_only_layers) is not "
            "supported, only with experts in every layer"
        )
    window = _window(config, 4096) if _get(config, "use_sliding_window", False) else FULL
    bias = _get(config, "attention_bias", False)
    return {
        **_common(config),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "layer_kinds": (window,) * config["num_hidden_layers"],
        "experts": {
            "num_experts": _get(config, "num_experts", config.get("num_local_experts")),
            "experts_per_token": _get(config, "num_experts_per_tok", 8),
            "inner_size": _get(config, "moe_intermediate_size", 768),
            "normalize": _get(config, "norm_topk_prob", False),
        },
    }


def _mistral(config: Config) -> Fields:
    if len(set(config.get("layer_types") or ())) > 1:
        raise ValueError("mistral with layers of several types is not supported")
    return {**_common(config), "layer_kinds": (_window(config, 4096),) * config["num_hidden_layers"]}


def _mixtral(config: Config) -> Fields:
    return {
        **_common(config, eps=1e-5, theta=1e6),
        "layer_kinds": (_window(config, None),) * config["num_hidden_layers"],
        "experts": {
            "num_experts": _get(config, "num_local_experts", 8),
            "experts_per_token": _get(config, "num_experts_per_tok", 2),
            "inner_size": config["intermediate_size"],
        },
    }


def _gemma(config: Config) -> Fields:
    """What Gemma 2 and 3 share."""
    bias = _get(config, "attention_bias", False)
    return {
        **_common(config, head_dim=256),
        "activation": _get(config, "hidden_activation", "gelu_pytorch_tanh"),
        "tie_embeddings": _get(config, "tie_word_embeddings", True),
        "qkv_bias": bias,
        "out_bias": bias,
        "sm_scale": _positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        "embed_scale": config["hidden_size"] ** 0.5,
        "causal": not _get(config, "use_bidirectional_attention", False),
    }


def _gemma2(config: Config) -> Fields:
    return {
        **_gemma(config),
        "attention_soft_cap": config.get("attn_logit_softcapping", 50.0),
        "final_soft_cap": config.get("final_logit_softcapping", 30.0),
        "layer_kinds": _kinds(config, _window(config, 4096), lambda layer: layer % 2 == 0),
    }


def _gemma3(config: Config) -> Fields:
    """Two RoPEs, in `rope_parameters` by layer type or, older, in `rope_theta`, `rope_scaling` (of the layers with
    full attention) and `rope_local_base_freq`. A window that looks both ways counts from its middle.
    """
    fields = _gemma(config)
    window = _window(config, 4096)
    if not fields["causal"] and window.size is not None:
        window = LayerKind("sliding_window", window.size // 2 + 1)
    pattern = _positive(config, "sliding_window_pattern", 6)
    by_type = config.get("rope_parameters") or {}
    if by_type:
        ropes = {name: {"rope_parameters": by_type.get(name)} for name in LAYER_TYPES}
    else:
        ropes = {
            "full_attention": {name: config.get(name) for name in ("rope_theta", "rope_scaling")},
            "sliding_attention": {"rope_theta": config.get("rope_local_base_freq")},
        }
    limit = {"max_position_embeddings": config.get("max_position_embeddings")}
    return {
        **fields,
        "qk_norm": True,
        "rope": RopeConfig.from_hf(limit | ropes["full_attention"], 1e6),
        "local_rope": RopeConfig.from_hf(limit | ropes["sliding_attention"], 10000.0),
        "attention_soft_cap": config.get("attn_logit_softcapping"),
        "final_soft_cap": config.get("final_logit_softcapping"),
        "layer_kinds": _kinds(config, window, lambda layer: (layer + 1) % pattern != 0),
    }


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(config: Config) -> Fields:
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_scaling": GPT_OSS_ROPE}
    bias = _get(config, "attention_bias", True)
    return {
        **_common(config, head_dim=64, eps=1e-5, theta=150000.0),
        "qkv_bias": bias,
        "out_bias": bias,
        "sinks": True,
        "layer_kinds": _kinds(config, _window(config, 128), lambda layer: layer % 2 == 0),
        "experts": {
            "num_experts": _get(config, "num_local_experts", 128),
            "experts_per_token": _get(config, "num_experts_per_tok", config.get("experts_per_token") or 4),
            "inner_size": config["intermediate_size"],
            "bias": True,
            "clamped": True,
            "swiglu_alpha": _get(config, "swiglu_alpha", 1.702),
            "swiglu_limit": _get(config, "swiglu_limit", 7.0),
        },
    }


def _recurrent_gemma(config: Config) -> Fields:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    pattern = _get(config, "block_types", ("recurrent", "recurrent", "attention"))
    strange = sorted(set(pattern) - {"recurrent", "attention"})
    if strange or not pattern:
        raise ValueError(f"block_types {list(pattern)} are not supported: only recurrent and attention")
    window = LayerKind("sliding_window", _get(config, "attention_window_size", 2048))
    kinds = {"recurrent": RECURRENT, "attention": window}
    width = _get(config, "lru_width", config["hidden_size"])
    _share(width, heads)
    bias = _get(config, "attention_bias", False)
    return {
        **_common({**config, "head_dim": None}),
        "rope": RopeConfig.from_hf(config, default_fraction=0.5),
        "max_position": _get(config, "max_position_embeddings", 8192),
        # Two projections share what the config calls the intermediate size.
        "intermediate_size": config["intermediate_size"] // 2,
        "activation": _get(config, "hidden_activation", "gelu_pytorch_tanh"),
        "tie_embeddings": _get(config, "tie_word_embeddings", True),
        "qkv_bias": bias,
        "out_bias": True,
        "mlp_bias": True,
        # The factor is kept in bfloat16 whatever the weights are.
        "embed_scale": float(np.sqrt(config["hidden_size"]).astype(ml_dtypes.bfloat16)),
        "final_soft_cap": _get(config, "logits_soft_cap", 30.0),
        "layer_kinds": tuple(kinds[pattern[layer % len(pattern)]] for layer in range(layers)),
        "recurrent": {"width": width, "conv_width": _get(config, "conv1d_width", 4)},
    }


READERS: dict[str, Callable[[Config], Fields]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "recurrent_gemma": _recurrent_gemma,
}
"""By `model_type`."""

"""What a model is, read once from a Hugging Face `config.json` and checked there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxcache.models.layers import ACTIVATIONS
from jaxcache.models.rope import RopeConfig

MODEL_TYPES = ("llama",)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder; static and hashable."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Tokens that the model was made for, prompt and answer together."""
    rope: RopeConfig
    norm_eps: int | float = 1e-6
    activation: str = "silu"
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        _check(vars(self))

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "ModelConfig":
        """From the contents of `config.json`; a `ValueError` names what is missing or not supported.

        Absent entries have the defaults of transformers' `LlamaConfig`. Entries that do not change what the model
        computes at inference are not read.
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {model_type!r} is not supported: only {', '.join(MODEL_TYPES)}")
        missing = [name for name in REQUIRED if config.get(name) is None]
        if missing:
            raise ValueError(f"the config of a {model_type} model must have {', '.join(missing)}")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        fields = {
            "vocab_size": config["vocab_size"],
            "hidden_size": hidden,
            "intermediate_size": config["intermediate_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"],
            "max_position": config.get("max_position_embeddings", 2048),
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "activation": config.get("hidden_act", "silu"),
            "tie_embeddings": config.get("tie_word_embeddings", False),
            "attention_bias": config.get("attention_bias", False),
            "mlp_bias": config.get("mlp_bias", False),
        }
        _check(fields)
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
            head_dim = hidden // heads
        _check({"head_dim": head_dim})
        return ModelConfig(**fields, head_dim=head_dim, rope=RopeConfig.from_hf(config))


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FLAGS = ("tie_embeddings", "attention_bias", "mlp_bias")


def _check(fields: Mapping[str, Any]) -> None:
    """A `ValueError` for the first value that is of the wrong type or range, or does not go with the others."""
    for name, value in fields.items():
        if name == "activation":
            if value not in ACTIVATIONS:
                raise ValueError(f"activation {value!r} is not one of {', '.join(sorted(ACTIVATIONS))}")
        elif name in FLAGS:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        elif name == "norm_eps":
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"norm_eps must be a positive number, got {value!r}")
        elif name != "rope" and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if fields.get("head_dim", 2) % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {fields['head_dim']}")
    if "num_heads" in fields and fields["num_heads"] % fields["num_kv_heads"]:
        raise ValueError(f"{fields['num_heads']} heads cannot share {fields['num_kv_heads']} KV heads evenly")

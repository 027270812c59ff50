"""What a model is: shapes and constants, checked once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxcache.models.activations import ACTIVATIONS
from jaxcache.models.grouping import FULL, LayerKind, group_layers
from jaxcache.models.hf_config import READERS, base_architecture
from jaxcache.models.rope import RopeConfig

MODEL_TYPES = tuple(READERS)


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in the place of each MLP."""

    num_experts: int
    experts_per_token: int
    inner_size: int
    """Width inside one expert."""
    normalize: bool = True
    """Whether the weights of a token's experts are made to sum to one."""
    bias: bool = False
    """Of the router and the experts."""
    clamped: bool = False
    """gpt-oss: `gate * sigmoid(1.702 gate) * (up + 1)` of clamped values in the place of the activation."""
    swiglu_alpha: int | float = 1.702
    swiglu_limit: int | float = 7.0

    def __post_init__(self) -> None:
        _check(vars(self))
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"a token cannot go to {self.experts_per_token} of {self.num_experts} experts")


@dataclass(frozen=True)
class RecurrentConfig:
    """RG-LRU layers (https://arxiv.org/abs/2402.19427)."""

    width: int
    conv_width: int
    """Taps of the causal convolution before the recurrence."""

    def __post_init__(self) -> None:
        _check(vars(self))
        if self.conv_width < 2:
            raise ValueError(f"conv_width must be at least 2, got {self.conv_width}")


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
    local_rope: RopeConfig | None = None
    """Of the sliding-window layers, where they have another one."""
    norm_eps: int | float = 1e-6
    activation: str = "silu"
    tie_embeddings: bool = False
    has_head: bool = True
    """False: a base model, which embeds but does not generate; its logits mean nothing."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norms of each head's Q and K before RoPE."""
    sinks: bool = False
    """One more logit per head in the softmax, which attends to nothing."""
    sm_scale: float | None = None
    """Of the attention scores; None is `head_dim ** -0.5`."""
    attention_soft_cap: int | float | None = None
    final_soft_cap: int | float | None = None
    embed_scale: int | float = 1
    layer_kinds: tuple[LayerKind, ...] = ()
    """What each layer keeps; empty stands for full attention everywhere."""
    causal: bool = True
    """False: a token also sees those after it, so that KV cannot be taken over from a shorter text."""
    experts: ExpertsConfig | None = None
    recurrent: RecurrentConfig | None = None

    def __post_init__(self) -> None:
        if not self.layer_kinds:
            object.__setattr__(self, "layer_kinds", (FULL,) * self.num_layers)
        _check(vars(self))
        for name, rope in (("rope", self.rope), ("local_rope", self.local_rope)):
            if rope is not None and (
                rope.rotated_lanes(self.head_dim) < 2 or rope.rotated_lanes(self.head_dim) % 2
            ):
                raise ValueError(f"{name} must rotate an even part of {self.head_dim} lanes, not {rope.fraction}")
        if len(self.layer_kinds) != self.num_layers:
            raise ValueError(f"{len(self.layer_kinds)} layer kinds for {self.num_layers} layers")
        if any(kind.kind == "recurrent" for kind in self.layer_kinds) != (self.recurrent is not None):
            raise ValueError("recurrent layers and their RecurrentConfig go together: give both or none")

    @property
    def embeds_only(self) -> str | None:
        """Why the model gives embeddings and no text; `None` for one that generates."""
        if not self.causal:
            return "its tokens see those after them, so that each new one would change all before it"
        return None if self.has_head else "its checkpoint is that of a base model, without a head (lm_head)"

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each KV-cache group, see `group_layers`."""
        return group_layers(self.layer_kinds)

    @property
    def kv_layers(self) -> int:
        """Layers of the KV array that all groups share: the attention layers of the largest group."""
        return self._largest_group(recurrent=False)

    @property
    def state_layers(self) -> int:
        """Layers of the array of recurrent states that all groups share; 0 where no layer is recurrent."""
        return self._largest_group(recurrent=True)

    def _largest_group(self, recurrent: bool) -> int:
        groups = self.layer_groups
        sizes = [len(group) for group in groups if (self.layer_kinds[group[0]].kind == "recurrent") == recurrent]
        return max(sizes, default=0)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "ModelConfig":
        """From the contents of `config.json`; a `ValueError` names what is missing or not supported.

        Absent entries have the defaults of transformers' config of that `model_type`. Entries that do not change
        what the model computes at inference are not read.
        """
        model_type = config.get("model_type")
        if model_type not in READERS:
            raise ValueError(f"model_type {model_type!r} is not supported: only {', '.join(MODEL_TYPES)}")
        missing = [name for name in REQUIRED if config.get(name) is None]
        if missing:
            raise ValueError(f"the config of a {model_type} model must have {', '.join(missing)}")
        fields = {
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": config["num_attention_heads"],
        }
        _check(fields)
        fields |= READERS[model_type](config)
        _check(fields)
        base = base_architecture(model_type) in (config.get("architectures") or ())
        if base and not fields["tie_embeddings"]:
            fields |= {"tie_embeddings": True, "has_head": False}
        for name, kind in (("experts", ExpertsConfig), ("recurrent", RecurrentConfig)):
            if name in fields:
                _check(fields[name])
                fields[name] = kind(**fields[name])
        return ModelConfig(**fields)


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FLAGS = (
    "tie_embeddings", "has_head", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sinks", "causal",
    "normalize", "bias", "clamped",
)  # fmt: skip
NUMBERS = ("norm_eps", "embed_scale", "swiglu_alpha", "swiglu_limit")
OPTIONAL_NUMBERS = ("sm_scale", "attention_soft_cap", "final_soft_cap")
PARTS = ("rope", "local_rope", "layer_kinds", "experts", "recurrent")
"""Checked where they are made."""


def _check(fields: Mapping[str, Any]) -> None:
    """A `ValueError` for the first value that is of the wrong type or range, or does not go with the others."""
    for name, value in fields.items():
        if name == "activation":
            if value not in ACTIVATIONS:
                raise ValueError(f"activation {value!r} is not one of {', '.join(sorted(ACTIVATIONS))}")
        elif name in FLAGS:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        elif name in NUMBERS or name in OPTIONAL_NUMBERS:
            if name in OPTIONAL_NUMBERS and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        elif name not in PARTS and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if fields.get("head_dim", 2) % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {fields['head_dim']}")
    if "num_kv_heads" in fields and fields["num_heads"] % fields["num_kv_heads"]:
        raise ValueError(f"{fields['num_heads']} heads cannot share {fields['num_kv_heads']} KV heads evenly")

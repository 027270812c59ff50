"""Rotary position embeddings (https://arxiv.org/abs/2104.09864), halves rotated as in Hugging Face's models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = ("default", "linear", "llama3", "yarn")

FIELDS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    },
    "yarn": {"factor": "factor", "original_max_position": "original_max_position_embeddings"},
}
"""Per kind the entries of a Hugging Face config that it needs, by our name."""


@dataclass(frozen=True)
class RopeConfig:
    """Base of the frequencies, and how they are stretched for contexts longer than those trained on."""

    theta: int | float = 10000.0
    kind: str = "default"
    factor: int | float = 1.0
    low_freq_factor: int | float = 1.0
    high_freq_factor: int | float = 4.0
    original_max_position: int = 8192
    beta_fast: int | float = 32.0
    """YaRN: frequencies that turn at least so often within `original_max_position` are kept."""
    beta_slow: int | float = 1.0
    """YaRN: frequencies that turn at most so often are divided by `factor`."""
    truncate: bool = True
    """YaRN: whether the lanes between which the two are blended are rounded outwards to whole ones."""
    attention_factor: int | float = 1.0
    """Cosines and sines are multiplied by it."""
    fraction: int | float = 1.0
    """Of a head's lanes, the first ones, that are rotated."""

    def __post_init__(self) -> None:
        _check(vars(self))
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )

    @staticmethod
    def from_hf(
        config: Mapping[str, Any], default_theta: float = 10000.0, default_fraction: float = 1.0
    ) -> "RopeConfig":
        """From a model's config: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
        values = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = values.get("rope_type", values.get("type", "default"))
        if kind == "yarn" and values.get("original_max_position_embeddings") is None:
            values["original_max_position_embeddings"] = config.get("max_position_embeddings")
        wanted = FIELDS.get(kind, {})
        missing = [name for name in wanted.values() if values.get(name) is None]
        if missing:
            raise ValueError(f"rope type {kind!r} needs {', '.join(missing)}")
        fields = {field: values[name] for field, name in wanted.items()}
        if kind == "yarn":
            fields |= {name: values[name] for name in ("beta_fast", "beta_slow") if values.get(name)}
            fields["truncate"] = values.get("truncate", True)
            fields["attention_factor"] = _yarn_attention_factor(values)
        fields["theta"] = _first(values.get("rope_theta"), config.get("rope_theta"), default_theta)
        partial = values.get("partial_rotary_factor"), config.get("partial_rotary_factor")
        fields["fraction"] = _first(*partial, default_fraction)
        _check({"kind": kind, **fields})
        return RopeConfig(kind=kind, **fields)

    def rotated_lanes(self, head_dim: int) -> int:
        """How many lanes of a head are rotated; even."""
        return int(head_dim * self.fraction)

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position, `[rotated lanes / 2]` float32."""
        lanes = self.rotated_lanes(head_dim)
        frequencies = 1.0 / self.theta ** (np.arange(0, lanes, 2, dtype=np.float64) / lanes)
        if self.kind == "linear":
            frequencies = frequencies / self.factor
        elif self.kind == "llama3":
            frequencies = self._llama3(frequencies)
        elif self.kind == "yarn":
            frequencies = self._yarn(frequencies, lanes)
        return frequencies.astype(np.float32)

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between are a blend of both."""
        turns = self.original_max_position * frequencies / (2 * np.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / self.factor

    def _yarn(self, frequencies: np.ndarray, lanes: int) -> np.ndarray:
        """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): as Llama 3.1, but blended over lanes."""

        def lane_of(turns: float) -> float:
            """The pair of lanes that turns so often within the original context."""
            wave = self.original_max_position / (turns * 2 * math.pi)
            return lanes * math.log(wave) / (2 * math.log(self.theta))

        low, high = lane_of(self.beta_fast), lane_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, lanes - 1)
        stretched = (np.arange(lanes // 2) - low) / max(high - low, 0.001)
        stretched = np.clip(stretched, 0.0, 1.0)
        return stretched * frequencies / self.factor + (1.0 - stretched) * frequencies


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _yarn_attention_factor(values: Mapping[str, Any]) -> float:
    """As written, or the paper's `0.1 ln(factor) + 1` (equation 22), or DeepSeek's quotient of two such terms."""
    if values.get("attention_factor") is not None:
        return values["attention_factor"]
    factor, scale, all_scale = values["factor"], values.get("mscale"), values.get("mscale_all_dim")
    _check({"factor": factor})

    def term(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return term(scale) / term(all_scale) if scale and all_scale else term(1.0)


def _check(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name == "kind":
            if value not in KINDS:
                raise ValueError(f"rope type {value!r} is not supported: choose one of {', '.join(KINDS)}")
        elif name == "truncate":
            if not isinstance(value, bool):
                raise ValueError(f"rope truncate must be true or false, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"rope {name} must be a positive number, got {value!r}")
        elif name == "fraction" and value > 1:
            raise ValueError(f"rope fraction (partial_rotary_factor) must be at most 1, got {value!r}")


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
    """Cosines and sines of each position's `R` angles (half the rotated lanes), f32; once per step, for all
    layers.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inverse_frequencies(head_dim))[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos, sin


def apply_rope(
    x: Float[Array, "T *heads D"], cos: Float[Array, "T R"], sin: Float[Array, "T R"]
) -> Float[Array, "T *heads D"]:
    """`x` with lane `i` and lane `i + R` rotated by angle `i`, for `i < R`; others stay. f32 inside."""
    half = cos.shape[-1]
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (half,)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    wide = x.astype(jnp.float32)
    first, second, kept = jnp.split(wide, [half, 2 * half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, kept], axis=-1).astype(x.dtype)

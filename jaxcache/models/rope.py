"""Rotary position embeddings (https://arxiv.org/abs/2104.09864), halves rotated as in Hugging Face's models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Base of the frequencies, and how they are stretched for contexts longer than those trained on."""

    theta: int | float = 10000.0
    kind: str = "default"
    factor: int | float = 1.0
    low_freq_factor: int | float = 1.0
    high_freq_factor: int | float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        _check(vars(self))
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "RopeConfig":
        """From a model's config: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
        values = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = values.get("rope_theta", config.get("rope_theta", 10000.0))
        kind = values.get("rope_type", values.get("type", "default"))
        wanted = {
            "default": {},
            "linear": {"factor": "factor"},
            "llama3": {
                "factor": "factor",
                "low_freq_factor": "low_freq_factor",
                "high_freq_factor": "high_freq_factor",
                "original_max_position": "original_max_position_embeddings",
            },
        }
        missing = [name for name in wanted.get(kind, {}).values() if values.get(name) is None]
        if missing:
            raise ValueError(f"rope type {kind!r} needs {', '.join(missing)}")
        fields = {field: values[name] for field, name in wanted.get(kind, {}).items()}
        _check({"theta": theta, "kind": kind, **fields})
        return RopeConfig(theta, kind, **fields)

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position, `[head_dim / 2]` float32."""
        frequencies = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "linear":
            frequencies = frequencies / self.factor
        elif self.kind == "llama3":
            frequencies = self._llama3(frequencies)
        return frequencies.astype(np.float32)

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between are a blend of both."""
        turns = self.original_max_position * frequencies / (2 * np.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / self.factor


def _check(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name == "kind":
            if value not in KINDS:
                raise ValueError(f"rope type {value!r} is not supported: choose one of {', '.join(KINDS)}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"rope {name} must be a positive number, got {value!r}")


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
    """Cosines and sines of each position's `R = head_dim / 2` angles, f32; once per step, for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inverse_frequencies(head_dim))[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "T *heads D"], cos: Float[Array, "T R"], sin: Float[Array, "T R"]
) -> Float[Array, "T *heads D"]:
    """`x` with lane `i` and lane `i + R` rotated by angle `i`, `R = D / 2`; f32 inside."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

"""Hugging Face's tensors as the parameters of our layers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcache.models.config import ModelConfig

DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints store it; it follows from the config."""


def llama_params(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """The nested dictionary of `nnx.state(Llama(config))`, each tensor read once.

    A `ValueError` names each tensor that is missing, unexpected or of the wrong shape.
    """
    shapes = dict(_llama_shapes(config))
    read = _Checked(tensors, shapes, dtype)
    c, group = config, config.num_heads // config.num_kv_heads
    params: dict[str, Any] = {
        "embed": {"table": jnp.asarray(read("model.embed_tokens.weight"))},
        "norm": {"scale": jnp.asarray(read("model.norm.weight"))},
    }
    if not c.tie_embeddings:
        params["head"] = {"table": jnp.asarray(read("lm_head.weight"))}

    def by_kv_head(prefix: str, kind: str) -> np.ndarray:
        """`[kv_heads, group + 2, head_dim, ...]`"""
        parts = [read(f"{prefix}.{name}_proj.{kind}") for name in "qkv"]
        cut = [
            part.reshape(c.num_kv_heads, width, c.head_dim, *part.shape[1:])
            for part, width in zip(parts, (group, 1, 1))
        ]
        return np.concatenate(cut, axis=1)

    def layer(n: int) -> dict[str, Any]:
        attention, mlp = f"model.layers.{n}.self_attn", f"model.layers.{n}.mlp"
        gate_up = [read(f"{mlp}.{name}_proj.weight") for name in ("gate", "up")]
        out = read(f"{attention}.o_proj.weight").T
        result = {
            "attention_norm": {"scale": read(f"model.layers.{n}.input_layernorm.weight")},
            "mlp_norm": {"scale": read(f"model.layers.{n}.post_attention_layernorm.weight")},
            "attention": {
                "qkv": {"w": np.moveaxis(by_kv_head(attention, "weight"), -1, 0)},
                "out": {"w": out.reshape(c.num_kv_heads, group, c.head_dim, c.hidden_size)},
            },
            "mlp": {
                "gate_up": {"w": np.stack(gate_up).transpose(2, 0, 1)},
                "down": {"w": read(f"{mlp}.down_proj.weight").T},
            },
        }
        if c.attention_bias:
            result["attention"]["qkv"]["b"] = by_kv_head(attention, "bias")
            result["attention"]["out"]["b"] = read(f"{attention}.o_proj.bias")
        if c.mlp_bias:
            biases = [read(f"{mlp}.{name}_proj.bias") for name in ("gate", "up")]
            result["mlp"]["gate_up"]["b"] = np.stack(biases)
            result["mlp"]["down"]["b"] = read(f"{mlp}.down_proj.bias")
        return result

    params["layers"] = _stack(layer, c.num_layers)
    return params


def _llama_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a checkpoint of `config` must have."""
    c = config
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)
    attention = {"q": (heads, c.hidden_size), "k": (kv_heads, c.hidden_size), "v": (kv_heads, c.hidden_size)}
    attention["o"] = (c.hidden_size, heads)
    inner = (c.intermediate_size, c.hidden_size)
    mlp = {"gate": inner, "up": inner, "down": inner[::-1]}
    for n in range(c.num_layers):
        prefix = f"model.layers.{n}"
        yield f"{prefix}.input_layernorm.weight", (c.hidden_size,)
        yield f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,)
        for part, shapes, bias in (("self_attn", attention, c.attention_bias), ("mlp", mlp, c.mlp_bias)):
            for name, shape in shapes.items():
                yield f"{prefix}.{part}.{name}_proj.weight", shape
                if bias:
                    yield f"{prefix}.{part}.{name}_proj.bias", shape[:1]


class _Checked:
    """Reads tensors as `dtype`, once it is sure that the names are the expected ones."""

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: jax.typing.DTypeLike,
    ) -> None:
        missing = [name for name in shapes if name not in tensors]
        if missing:
            raise ValueError(f"the checkpoint lacks {_some(missing)}")
        unexpected = [name for name in tensors if name not in shapes and not name.endswith(DERIVED)]
        if "lm_head.weight" in unexpected:
            unexpected.remove("lm_head.weight")
            if not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
                raise ValueError(
                    "the config ties the head to the embedding (tie_word_embeddings), but the checkpoint's "
                    "lm_head.weight differs from model.embed_tokens.weight: set tie_word_embeddings to false"
                )
        if unexpected:
            raise ValueError(f"the checkpoint has tensors that the config does not explain: {_some(unexpected)}")
        self._tensors, self._shapes, self._dtype = tensors, shapes, jnp.dtype(dtype)

    def __call__(self, name: str) -> np.ndarray:
        array = np.asarray(self._tensors[name])
        if array.shape != self._shapes[name]:
            raise ValueError(f"{name} has shape {array.shape}, but the config says {self._shapes[name]}")
        return array.astype(self._dtype)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _stack(layer: Callable[[int], dict[str, Any]], num_layers: int) -> dict[str, Any]:
    """`layer(0), layer(1), ...` with a leading layer axis on every leaf; holds no more than one layer twice."""
    first = layer(0)
    stacked = jax.tree.map(lambda leaf: np.empty((num_layers, *leaf.shape), leaf.dtype), first)
    for n in range(num_layers):
        this = layer(n) if n else first
        jax.tree.map(lambda whole, part, n=n: whole.__setitem__(n, part), stacked, this)
    return jax.tree.map(jnp.asarray, stacked)

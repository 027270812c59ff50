"""Hugging Face's tensors as the parameters of our layers.

A `Part` says which tensors one of our modules is made from, and how. Families name the parts of their layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcache.models.config import ExpertsConfig, ModelConfig, RecurrentConfig

Tensors = Mapping[str, np.ndarray]

DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints store it; it follows from the config."""


class Part(NamedTuple):
    """One module's weights."""

    shapes: dict[str, tuple[int, ...]]
    """By the end of the tensor's name."""
    build: Callable[[Tensors], dict[str, Any]]
    """From tensors by those names to parameters as in `nnx.state(module)`."""


LayerParts = dict[str, tuple[str, Part]]
"""By our module's name: where Hugging Face has it (`self_attn`), and what is there."""


def norm_part(width: int) -> Part:
    return Part({".weight": (width,)}, lambda t: {"scale": t[".weight"]})


def attention_part(config: ModelConfig) -> Part:
    """`Attention`, from separate projections and, where the family has them, norms and sinks."""
    c, group = config, config.num_heads // config.num_kv_heads
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        ".q_proj.weight": (heads, c.hidden_size),
        ".k_proj.weight": (kv_heads, c.hidden_size),
        ".v_proj.weight": (kv_heads, c.hidden_size),
        ".o_proj.weight": (c.hidden_size, heads),
    }
    if c.qkv_bias:
        shapes |= {".q_proj.bias": (heads,), ".k_proj.bias": (kv_heads,), ".v_proj.bias": (kv_heads,)}
    if c.out_bias:
        shapes[".o_proj.bias"] = (c.hidden_size,)
    if c.qk_norm:
        shapes |= {".q_norm.weight": (c.head_dim,), ".k_norm.weight": (c.head_dim,)}
    if c.sinks:
        shapes[".sinks"] = (c.num_heads,)

    def by_kv_head(tensors: Tensors, kind: str) -> np.ndarray:
        """`[kv_heads, group + 2, head_dim, ...]`"""
        parts = [tensors[f".{name}_proj.{kind}"] for name in "qkv"]
        cut = [
            part.reshape(c.num_kv_heads, width, c.head_dim, *part.shape[1:])
            for part, width in zip(parts, (group, 1, 1))
        ]
        return np.concatenate(cut, axis=1)

    def build(tensors: Tensors) -> dict[str, Any]:
        out = tensors[".o_proj.weight"].T.reshape(c.num_kv_heads, group, c.head_dim, c.hidden_size)
        result: dict[str, Any] = {
            "qkv": {"w": np.moveaxis(by_kv_head(tensors, "weight"), -1, 0)},
            "out": {"w": out},
        }
        if c.qkv_bias:
            result["qkv"]["b"] = by_kv_head(tensors, "bias")
        if c.out_bias:
            result["out"]["b"] = tensors[".o_proj.bias"]
        if c.qk_norm:
            rows = [tensors[".q_norm.weight"]] * group + [tensors[".k_norm.weight"]]
            result["qk_norm"] = {"scale": np.stack(rows)}
        if c.sinks:
            result["sinks"] = tensors[".sinks"].reshape(c.num_kv_heads, group)
        return result

    return Part(shapes, build)


def mlp_part(config: ModelConfig) -> Part:
    """`GatedMLP`"""
    inner = (config.intermediate_size, config.hidden_size)
    weights = {"gate": inner, "up": inner, "down": inner[::-1]}
    shapes: dict[str, tuple[int, ...]] = {f".{name}_proj.weight": shape for name, shape in weights.items()}
    if config.mlp_bias:
        shapes |= {f".{name}_proj.bias": shape[:1] for name, shape in weights.items()}

    def build(tensors: Tensors) -> dict[str, Any]:
        gate_up = np.stack([tensors[".gate_proj.weight"], tensors[".up_proj.weight"]])
        result = {
            "gate_up": {"w": gate_up.transpose(2, 0, 1)},
            "down": {"w": tensors[".down_proj.weight"].T},
        }
        if config.mlp_bias:
            result["gate_up"]["b"] = np.stack([tensors[".gate_proj.bias"], tensors[".up_proj.bias"]])
            result["down"]["b"] = tensors[".down_proj.bias"]
        return result

    return Part(shapes, build)


def experts_part(config: ModelConfig, gate: str, up: str, down: str) -> Part:
    """`Experts` from one tensor per expert and projection, which are called `gate`, `up` and `down`."""
    e, hidden = _experts(config), config.hidden_size
    inner = (e.inner_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {".gate.weight": (e.num_experts, hidden)}
    for n in range(e.num_experts):
        shapes |= {f".experts.{n}.{gate}.weight": inner, f".experts.{n}.{up}.weight": inner}
        shapes[f".experts.{n}.{down}.weight"] = inner[::-1]

    def build(tensors: Tensors) -> dict[str, Any]:
        def all_experts(name: str) -> np.ndarray:
            return np.stack([tensors[f".experts.{n}.{name}.weight"].T for n in range(e.num_experts)])

        return {
            "router": {"w": tensors[".gate.weight"].T},
            "gate_up": np.stack([all_experts(gate), all_experts(up)], axis=2),
            "down": all_experts(down),
        }

    return Part(shapes, build)


def fused_experts_part(config: ModelConfig) -> Part:
    """`Experts` as gpt-oss stores them: in one tensor, `[in, out]`, gate and up in turns along the last axis."""
    e, hidden = _experts(config), config.hidden_size
    shapes = {
        ".router.weight": (e.num_experts, hidden),
        ".router.bias": (e.num_experts,),
        ".experts.gate_up_proj": (e.num_experts, hidden, 2 * e.inner_size),
        ".experts.gate_up_proj_bias": (e.num_experts, 2 * e.inner_size),
        ".experts.down_proj": (e.num_experts, e.inner_size, hidden),
        ".experts.down_proj_bias": (e.num_experts, hidden),
    }

    def apart(array: np.ndarray) -> np.ndarray:
        return array.reshape(*array.shape[:-1], e.inner_size, 2).swapaxes(-1, -2)

    def build(tensors: Tensors) -> dict[str, Any]:
        return {
            "router": {"w": tensors[".router.weight"].T, "b": tensors[".router.bias"]},
            "gate_up": apart(tensors[".experts.gate_up_proj"]),
            "gate_up_b": apart(tensors[".experts.gate_up_proj_bias"]),
            "down": tensors[".experts.down_proj"],
            "down_b": tensors[".experts.down_proj_bias"],
        }

    return Part(shapes, build)


def _experts(config: ModelConfig) -> ExpertsConfig:
    if config.experts is None:
        raise ValueError("the config has no experts")
    return config.experts


def recurrent_part(config: ModelConfig) -> Part:
    """`RecurrentMixer`"""
    r = config.recurrent
    if not isinstance(r, RecurrentConfig):
        raise ValueError("the config has no recurrent layers")
    hidden, heads, block = config.hidden_size, config.num_heads, r.width // config.num_heads
    shapes = {
        ".linear_x.weight": (r.width, hidden),
        ".linear_x.bias": (r.width,),
        ".linear_y.weight": (r.width, hidden),
        ".linear_y.bias": (r.width,),
        ".linear_out.weight": (hidden, r.width),
        ".linear_out.bias": (hidden,),
        ".conv_1d.weight": (r.width, 1, r.conv_width),
        ".conv_1d.bias": (r.width,),
        ".rg_lru.recurrent_param": (r.width,),
        ".rg_lru.input_gate_weight": (heads, block, block),
        ".rg_lru.input_gate_bias": (heads, block),
        ".rg_lru.recurrent_gate_weight": (heads, block, block),
        ".rg_lru.recurrent_gate_bias": (heads, block),
    }

    def build(tensors: Tensors) -> dict[str, Any]:
        def both(name: str, ends: tuple[str, str]) -> np.ndarray:
            return np.stack([tensors[name.format(end)] for end in ends])

        return {
            "xy": {
                "w": both(".linear_{}.weight", ("x", "y")).transpose(2, 0, 1),
                "b": both(".linear_{}.bias", ("x", "y")),
            },
            "out": {"w": tensors[".linear_out.weight"].T, "b": tensors[".linear_out.bias"]},
            "gates": both(".rg_lru.{}_gate_weight", ("input", "recurrent")),
            "gates_b": both(".rg_lru.{}_gate_bias", ("input", "recurrent")),
            "conv": tensors[".conv_1d.weight"][:, 0].T,
            "conv_b": tensors[".conv_1d.bias"],
            "decay": tensors[".rg_lru.recurrent_param"],
        }

    return Part(shapes, build)


def decoder_params(
    config: ModelConfig,
    tensors: Tensors,
    dtype: jax.typing.DTypeLike,
    layers: Sequence[LayerParts],
    pattern: int,
    final_norm: str,
) -> dict[str, Any]:
    """The nested dictionary of `nnx.state(decoder)`, each tensor read once.

    `layers`: the parts of each layer. `pattern`: how many layers the stacked pattern is long, 0 where there is
    none. A `ValueError` names each tensor that is missing, unexpected or of the wrong shape.
    """
    c = config
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size), f"{final_norm}.weight": (c.hidden_size,)}
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for n, parts in enumerate(layers):
        for place, part in parts.values():
            shapes |= {f"model.layers.{n}.{place}{end}": shape for end, shape in part.shapes.items()}
    read = _Checked(tensors, shapes, dtype)

    def layer(n: int) -> dict[str, Any]:
        result = {}
        for name, (place, part) in layers[n].items():
            result[name] = part.build({end: read(f"model.layers.{n}.{place}{end}") for end in part.shapes})
        return result

    params: dict[str, Any] = {
        "embed": {"table": jnp.asarray(read("model.embed_tokens.weight"))},
        "norm": {"scale": jnp.asarray(read(f"{final_norm}.weight"))},
    }
    if not c.tie_embeddings:
        params["head"] = {"table": jnp.asarray(read("lm_head.weight"))}
    repeats = len(layers) // pattern if pattern else 0
    params["pattern"] = {
        nth: _stack([lambda n=n: layer(n) for n in range(nth, pattern * repeats, pattern)])
        for nth in range(pattern)
    }
    left = range(pattern * repeats, len(layers))
    params["rest"] = {nth: jax.tree.map(jnp.asarray, layer(n)) for nth, n in enumerate(left)}
    return params


class _Checked:
    """Reads tensors as `dtype`, once it is sure that the names are the expected ones."""

    def __init__(
        self,
        tensors: Tensors,
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


def _stack(layers: Sequence[Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    """`layers[0](), layers[1](), ...` with a leading axis on every leaf; holds no more than one layer twice."""
    first = layers[0]()
    stacked = jax.tree.map(lambda leaf: np.empty((len(layers), *leaf.shape), leaf.dtype), first)
    for n, layer in enumerate(layers):
        this = layer() if n else first
        jax.tree.map(lambda whole, part, n=n: whole.__setitem__(n, part), stacked, this)
    return jax.tree.map(jnp.asarray, stacked)

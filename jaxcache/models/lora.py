"""Low-rank adapters (https://arxiv.org/abs/2106.09685): several sets of small changes to one model's projections.

A projection `x W` with an adapter computes `x W + scale (x A^T) B^T`, with A `[rank, in]` and B `[out, rank]`. All
loaded adapters lie stacked beside the weight, in slots of fixed size, so that loading one compiles nothing. Every
row is multiplied with the A of all slots at once; all but its own slot's products are then set to zero. That costs
`max_loras * max_lora_rank` more lanes of each projection, and no gather of weights per row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcache.models.config import ModelConfig
from jaxcache.models.decoder import Decoder, layer_layout
from jaxcache.models.layers import Linear
from jaxcache.settings import settings


@settings
class LoRAConfig:
    """Room for adapters. What it takes is taken at construction, whether adapters are loaded or not."""

    max_loras: int = 4
    """Adapters that are loaded at a time."""
    max_lora_rank: int = 16
    """The highest rank that one may have."""

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_lora_rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"LoRAConfig.{name} must be a positive integer, got {value!r}")


class AdapterWeight(nnx.Variable):
    """Kept apart from the model's own parameters, which change without it."""


@dataclass(frozen=True, eq=False)
class LoRAAdapter:
    """One adapter's weights, by the name of the projection that they change. A `ValueError` if they do not go
    together.
    """

    weights: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(repr=False)
    """Named and laid out as Hugging Face does: `model.layers.0.self_attn.q_proj` -> (A `[rank, in]`, B `[out,
    rank]`).
    """
    scale: float = 1.0
    """Of the product: PEFT's `lora_alpha / r`."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("an adapter needs weights for at least one projection")
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float) or not np.isfinite(self.scale):
            raise ValueError(f"an adapter's scale must be a finite number, got {self.scale!r}")
        checked = {name: _checked(name, *pair) for name, pair in self.weights.items()}
        object.__setattr__(self, "weights", checked)

    @property
    def rank(self) -> int:
        """The highest of its projections."""
        return max(len(a) for a, _ in self.weights.values())


def _checked(name: str, a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(a), np.asarray(b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.size or not b.size:
        raise ValueError(
            f"{name}: A must be [rank, in] and B [out, rank], got {list(a.shape)} and {list(b.shape)}"
        )
    for matrix in (a, b):
        if not jnp.issubdtype(matrix.dtype, jnp.floating):
            raise ValueError(f"{name}: an adapter's weights must be floating point, got {matrix.dtype}")
        if not np.isfinite(matrix.astype(np.float32)).all():
            raise ValueError(f"{name}: an adapter's weights must be finite, but some are not")
    return a, b


class AdapterSlots(nnx.Module):
    """The stacked adapters of one `Linear`, which may be several projections side by side.

    `a` is `[*in, P, S, r]` and `b` `[S, r, *out]`, for P projections, S slots and rank r. The projections share
    `out` along `axis`, on which they have the given `widths`.
    """

    def __init__(self, of: Linear, lead: tuple[int, ...], names: "Projections", config: LoRAConfig) -> None:
        shape, dtype = of.w[...].shape[len(lead) :], of.w[...].dtype
        inside, outside = shape[: of.in_axes], shape[of.in_axes :]
        self.axis = names.axis
        self.widths = tuple(outside[names.axis] if width is None else width for width in names.widths)
        self.a = AdapterWeight(
            jnp.zeros((*lead, *inside, len(self.widths), config.max_loras, config.max_lora_rank), dtype)
        )
        self.b = AdapterWeight(jnp.zeros((*lead, config.max_loras, config.max_lora_rank, *outside), dtype))

    def __call__(self, x: Float[Array, "T ..."], slots: Int[Array, " T"]) -> Float[Array, "T ..."]:
        """What the rows' adapters add to the product, f32."""
        a, b = self.a[...], self.b[...]
        inside = a.ndim - 3
        contract = tuple(range(1, 1 + inside)), tuple(range(inside))
        low = lax.dot_general(x, a, (contract, ((), ())), preferred_element_type=jnp.float32)
        mine = slots[:, None] == jnp.arange(1, 1 + b.shape[0], dtype=slots.dtype)[None]
        low = jnp.where(mine[:, None, :, None], low, 0.0).astype(x.dtype)
        parts, start = [], 0
        for nth, width in enumerate(self.widths):
            part = lax.slice_in_dim(b, start, start + width, axis=2 + self.axis)
            summed = (((1, 2), (0, 1)), ((), ()))
            parts.append(lax.dot_general(low[:, nth], part, summed, preferred_element_type=jnp.float32))
            start += width
        return jnp.concatenate(parts, axis=1 + self.axis) if len(parts) > 1 else parts[0]

    def parts(
        self, names: Sequence[str], a: np.ndarray, b: np.ndarray, slot: int
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """For each projection its name, and what of one layer's `a` and `b` is its own in a slot: `[*in, r]` and
        `[r, *out]`, views.
        """
        start = 0
        for nth, (name, width) in enumerate(zip(names, self.widths)):
            lanes = (slice(None),) * (1 + self.axis) + (slice(start, start + width),)
            yield name, a[..., nth, slot - 1, :], b[slot - 1][lanes]
            start += width


class Projections(NamedTuple):
    """What Hugging Face calls the projections that one `Linear` is made of, and how they lie in it."""

    module: str
    """Our name of the module in a layer, by which the family says where Hugging Face has it."""
    linear: str
    names: tuple[str, ...]
    axis: int
    widths: tuple[int | None, ...]
    """Along `axis` of the output; `None` for all of it."""


def projections(config: ModelConfig) -> tuple[Projections, ...]:
    """Whatever may have an adapter. Experts and recurrent mixers may not."""
    group = config.num_heads // config.num_kv_heads
    return (
        Projections("attention", "qkv", ("q_proj", "k_proj", "v_proj"), 1, (group, 1, 1)),
        Projections("attention", "out", ("o_proj",), 0, (None,)),
        Projections("mlp", "gate_up", ("gate_proj", "up_proj"), 0, (1, 1)),
        Projections("mlp", "down", ("down_proj",), 0, (None,)),
    )


def add_slots(model: Decoder, config: LoRAConfig) -> Decoder:
    """The same model, its parameters shared, with empty slots at every projection; called with `RowInputs`."""
    model = nnx.merge(*nnx.split(model))
    for layers, names, linear in _linears(model):
        lead = (len(layers),) if isinstance(layers, range) else ()
        linear.slots = nnx.data(AdapterSlots(linear, lead, names, config))
    return model


def fill_slot(model: Decoder, slot: int, adapter: LoRAAdapter | None) -> None:
    """Put `adapter` into a slot, from 1 on, and nothing else; `None` empties it.

    A `ValueError`, with `model` half changed, says what of the adapter the model has no place for.
    """
    weights = {} if adapter is None else dict(adapter.weights)
    scale = 1.0 if adapter is None else adapter.scale
    places = []
    for layers, names, linear in _linears(model):
        slots: AdapterSlots = linear.slots
        stacked = isinstance(layers, range)
        a, b = (np.array(stack[...]) for stack in (slots.a, slots.b))
        a[..., slot - 1, :] = 0
        b[(slice(None),) * stacked + (slot - 1,)] = 0
        for nth, layer in enumerate(layers if stacked else (layers,)):
            at = (nth,) if stacked else ()
            for name, ours_a, ours_b in slots.parts(_full_names(model, layer, names), a[at], b[at], slot):
                places.append(name)
                if name in weights:
                    _enter(name, *weights.pop(name), scale, ours_a, ours_b)
        slots.a[...] = jax.device_put(a, slots.a[...].sharding)
        slots.b[...] = jax.device_put(b, slots.b[...].sharding)
    if weights:
        kinds = sorted({".".join(name.split(".")[3:]) for name in places})
        raise ValueError(
            f"the adapter changes {', '.join(sorted(weights)[:3])}, for which this model has no place: it takes "
            f"adapters in {model.config.num_layers} layers, at {', '.join(kinds)}"
        )


def _linears(model: Decoder) -> Iterator[tuple[range | int, Projections, Any]]:
    """(the layer's number, or those of all its repetitions, what it is made of, the module)."""
    length, repeats, left = layer_layout(model.config.layer_kinds)
    blocks = [(range(nth, length * repeats, length), block) for nth, block in enumerate(model.pattern)]
    for layers, block in [*blocks, *zip(left, model.rest)]:
        for names in projections(model.config):
            if (module := getattr(block, names.module, None)) is not None:
                yield layers, names, getattr(module, names.linear)


def _full_names(model: Decoder, layer: int, names: Projections) -> list[str]:
    """What Hugging Face calls the projections of one layer."""
    place, _ = type(model).layer_parts(model.config, model.config.layer_kinds[layer])[names.module]
    return [f"model.layers.{layer}.{place}.{name}" for name in names.names]


def _enter(name: str, a: np.ndarray, b: np.ndarray, scale: float, ours_a: np.ndarray, ours_b: np.ndarray) -> None:
    """Hugging Face's A and B into views of ours, `[*in, r]` and `[r, *out]`."""
    rank, places = len(a), ours_b.shape[0]
    width_in, width_out = ours_a.size // places, ours_b.size // places
    if (a.shape[1], b.shape[0]) != (width_in, width_out):
        raise ValueError(
            f"{name} takes A [rank, {width_in}] and B [{width_out}, rank], got {list(a.shape)} and {list(b.shape)}"
        )
    if rank > places:
        raise ValueError(f"{name} has rank {rank}, but LoRAConfig.max_lora_rank is {places}: raise it")
    with np.errstate(over="ignore"):
        ours_a[..., :rank] = a.T.reshape(*ours_a.shape[:-1], rank)
        ours_b[:rank] = (b.astype(np.float32).T * np.float32(scale)).reshape(rank, *ours_b.shape[1:])
    if not all(np.isfinite(ours.astype(np.float32)).all() for ours in (ours_a, ours_b)):
        raise ValueError(f"{name}, scaled by {scale}, has values that {ours_b.dtype} does not hold")

"""What all decoder families share: embedding, layers over one KV array, final norm, head."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxcache.kernels.dispatch import Implementation
from jaxcache.kernels.layout import KVCache
from jaxcache.kernels.step import StepInputs
from jaxcache.models.config import ModelConfig
from jaxcache.models.convert import LayerParts, decoder_params
from jaxcache.models.grouping import LayerKind, LayerPlace, layer_places, period
from jaxcache.models.layers import Embedding, LayerContext, OffsetRMSNorm, RMSNorm
from jaxcache.models.recurrent import HybridCache
from jaxcache.models.rope import rope_tables
from jaxcache.models.rows import NO_ROW_INPUTS, RowInputs

Cache = KVCache | HybridCache


class Layer(Protocol):
    """One layer of a family: a module made as `Layer(config, kind, dtype=dtype, rngs=rngs)`."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None: ...

    def __call__(
        self, x: Float[Array, "T D"], cache: Any, context: LayerContext, *, implementation: Implementation
    ) -> tuple[Float[Array, "T D"], Any]: ...


class Decoder(nnx.Module):
    """Base of the families, which say what a layer is and what Hugging Face calls its weights.

    Where the layers repeat a pattern, `pattern` holds one module for each of its positions, with a leading axis
    over the repetitions on every parameter; a step scans over the repetitions. `rest` holds the layers that are
    left.

    Activations have the dtype of the parameters; norms, RoPE, softmax and all sums are f32. On CPU keep to float32
    parameters: bfloat16 is slower there.
    """

    layer_class: ClassVar[Callable[..., Any]]
    norm_class: ClassVar[type[RMSNorm | OffsetRMSNorm]] = RMSNorm
    final_norm: ClassVar[str] = "model.norm"
    """Hugging Face's name."""

    @staticmethod
    def layer_parts(config: ModelConfig, kind: LayerKind) -> LayerParts:
        """What Hugging Face calls the weights of a layer of this kind."""
        raise NotImplementedError

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        length, repeats, left = layer_layout(config.layer_kinds)

        def stacked(kind: LayerKind) -> Any:
            @nnx.split_rngs(splits=repeats)
            @nnx.vmap
            def make(rngs: nnx.Rngs) -> Any:
                return type(self).layer_class(config, kind, dtype=dtype, rngs=rngs)

            return make(rngs)

        self.pattern = nnx.List([stacked(kind) for kind in config.layer_kinds[:length]])
        self.rest = nnx.List(
            [type(self).layer_class(config, config.layer_kinds[n], dtype=dtype, rngs=rngs) for n in left]
        )
        self.norm = type(self).norm_class((config.hidden_size,), config.norm_eps, dtype=dtype)
        if config.tie_embeddings:
            self.head = None
        else:
            self.head = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, np.ndarray],
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> "Decoder":
        """From weights under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight` `[out, in]`, ...).

        A `ValueError` names each tensor that is missing, unexpected or of the wrong shape.
        """
        model = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), dtype=dtype))
        graph, state = nnx.split(model)
        length, _, _ = layer_layout(config.layer_kinds)
        parts = [cls.layer_parts(config, kind) for kind in config.layer_kinds]
        params = decoder_params(config, tensors, dtype, parts, length, cls.final_norm)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def __call__(
        self,
        step: StepInputs | tuple[StepInputs, ...],
        kv: Cache,
        implementation: Implementation = None,
        rows: RowInputs = NO_ROW_INPUTS,
    ) -> tuple[Float[Array, "T D"], Cache]:
        """The step's rows after the final norm, and `kv` with what they add written.

        `step`: one for each of `config.layer_groups`: they differ in `block_tables`, `slot_mapping`, `shared`; the
        step itself where there is one group. `kv`: of `config.kv_layers` layers; with recurrent layers a
        `HybridCache`. `implementation` chooses the attention kernels (see `paged_attention`). `rows`: adapters,
        for a model with slots (`lora.add_slots`), and embeddings in the place of tokens', scaled already where the
        model has an `embed_scale`. Donate `kv` under jit.
        """
        config = self.config
        places = layer_places(config.layer_groups)
        steps = (step,) if isinstance(step, StepInputs) else step
        if len(steps) != len(config.layer_groups):
            raise ValueError(f"the model has {len(config.layer_groups)} groups of layers, got {len(steps)} steps")
        contexts = _Contexts(config, steps, rows.adapter)
        kinds = config.layer_kinds
        x = self.embed(steps[0].token_ids)
        if config.embed_scale != 1:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
        if rows.embeds is not None and rows.given is not None:
            x = jnp.where(rows.given[:, None], rows.embeds.astype(x.dtype), x)

        length, repeats, left = layer_layout(kinds)
        if repeats:
            x, kv = self._scan(x, kv, contexts, places[: length * repeats], implementation)
        for layer, n in zip(self.rest, left):
            x, kv = layer(x, kv, contexts(kinds[n], places[n]), implementation=implementation)
        return self.norm(x), kv

    def _scan(
        self,
        x: Float[Array, "T D"],
        kv: Cache,
        contexts: "_Contexts",
        places: Sequence[LayerPlace],
        implementation: Implementation,
    ) -> tuple[Float[Array, "T D"], Cache]:
        """The layers of `pattern`, repetition after repetition."""
        graph, params = nnx.split(self.pattern)
        length = len(self.pattern)
        at_layer = jnp.asarray(np.array(places, np.int32).reshape(-1, length, 2))

        def repetition(carry: tuple[Array, Any], scanned: tuple[Any, Array]) -> tuple[tuple[Array, Any], None]:
            x, kv = carry
            layer_params, at = scanned
            for nth, layer in enumerate(nnx.merge(graph, layer_params)):
                context = contexts(self.config.layer_kinds[nth], LayerPlace(at[nth, 0], at[nth, 1]))
                x, kv = layer(x, kv, context, implementation=implementation)
            return (x, kv), None

        (x, kv), _ = lax.scan(repetition, (x, kv), (params, at_layer))
        return x, kv

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """f32 logits over the vocabulary of rows that `__call__` returned."""
        head = self.embed if self.head is None else self.head
        logits, cap = head.logits(hidden), self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def layer_layout(kinds: Sequence[LayerKind]) -> tuple[int, int, range]:
    """Length of the pattern, how often it repeats, and the layers left."""
    length = period(kinds)
    repeats = len(kinds) // length if length else 0
    return length, repeats, range(length * repeats, len(kinds))


class _Contexts:
    """What each layer reads of a step. RoPE tables are made once."""

    def __init__(
        self, config: ModelConfig, steps: tuple[StepInputs, ...], adapter: Int[Array, " T"] | None
    ) -> None:
        self.adapter = adapter
        self.step = steps[0]
        self.single = len(steps) == 1
        self.tables = jnp.stack([step.block_tables for step in steps])
        self.slots = jnp.stack([step.slot_mapping for step in steps])
        self.shared = jax.tree.map(lambda *of_groups: jnp.stack(of_groups), *(step.shared for step in steps))
        self.rope = rope_tables(config.rope, config.head_dim, self.step.positions)
        self.local_rope = self.rope
        if config.local_rope is not None:
            self.local_rope = rope_tables(config.local_rope, config.head_dim, self.step.positions)

    def __call__(self, kind: LayerKind, place: LayerPlace) -> LayerContext:
        cos, sin = self.local_rope if kind.kind == "sliding_window" else self.rope
        step = self.step
        if not self.single:
            step = step._replace(
                block_tables=self.tables[place.group],
                slot_mapping=self.slots[place.group],
                shared=jax.tree.map(lambda of_groups: of_groups[place.group], self.shared),
            )
        return LayerContext(step, place.layer, cos, sin, self.adapter)


CUTS = {
    ("embed", "table"): 0,
    ("head", "table"): 0,
    ("qkv", "w"): 1,
    ("qkv", "b"): 0,
    ("out", "w"): 0,
    ("attention", "sinks"): 0,
    ("gate_up", "w"): 2,
    ("gate_up", "b"): 1,
    ("down", "w"): 0,
    ("experts", "gate_up"): 3,
    ("experts", "gate_up_b"): 2,
    ("experts", "down"): 1,
}
"""The axis of a parameter that tensor parallelism cuts, by the end of its path."""


def param_specs(model_class: type[Decoder], config: ModelConfig, axis: str = "tp") -> Any:
    """How to cut the parameters over mesh axis `axis`: an `nnx.State` of `PartitionSpec`, as `nnx.state(model)`.

    KV heads, the inner width of the MLP or of each expert, and the vocabulary are cut; the mesh axis must divide
    all of them. Recurrent layers are not. The KV array goes with them: `PartitionSpec(None, None, axis)` for
    `data` and `scales` alike.
    """
    model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))

    def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        names = [name for name in names if name != "value"]
        cut = CUTS.get((names[-2], names[-1]))
        if cut is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * (cut + (names[0] == "pattern")), axis)

    return jax.tree.map_with_path(spec, nnx.state(model, nnx.Param))

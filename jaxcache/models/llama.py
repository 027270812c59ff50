"""The Llama family: Llama 2 and 3, SmolLM2 and others of `model_type` llama."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxcache.kernels.layout import KVCache
from jaxcache.kernels.step import StepInputs
from jaxcache.models.config import ModelConfig
from jaxcache.models.convert import llama_params
from jaxcache.models.layers import Attention, Embedding, GatedMLP, RMSNorm, StepContext
from jaxcache.models.rope import rope_tables


class Block(nnx.Module):
    """One decoder layer: attention and MLP, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        c = config
        self.attention_norm = RMSNorm(c.hidden_size, c.norm_eps, dtype=dtype)
        self.attention = Attention(
            c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, bias=c.attention_bias, dtype=dtype, rngs=rngs
        )
        self.mlp_norm = RMSNorm(c.hidden_size, c.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(
            c.hidden_size, c.intermediate_size, c.activation, bias=c.mlp_bias, dtype=dtype, rngs=rngs
        )

    def __call__(
        self,
        x: Float[Array, "T D"],
        kv: KVCache,
        layer: Int[Array, ""],
        context: StepContext,
        *,
        implementation: str | None,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        y, kv = self.attention(self.attention_norm(x), kv, layer, context, implementation=implementation)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), kv


class Llama(nnx.Module):
    """A decoder whose layers are one `Block` with a leading layer axis on every parameter.

    Activations have the dtype of the parameters; norms, RoPE, softmax and all sums are f32. On CPU keep to float32
    parameters: bfloat16 is slower there.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, dtype=dtype, rngs=rngs)

        self.layers = stacked(rngs)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
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
    ) -> "Llama":
        """From weights under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight` `[out, in]`, ...).

        A `ValueError` names each tensor that is missing, unexpected or of the wrong shape.
        """
        model = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), dtype=dtype))
        graph, state = nnx.split(model)
        params = llama_params(config, tensors, dtype)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def __call__(
        self, step: StepInputs, kv: KVCache, implementation: str | None = None
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """The step's rows after the final norm, and `kv` with their K and V written.

        `implementation` chooses the attention kernels (see `paged_attention`). Donate `kv` under jit.
        """
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, step.positions)
        context = StepContext(step, cos, sin)
        graph, params = nnx.split(self.layers)

        def block(carry: tuple[Array, KVCache], scanned: tuple[Any, Array]) -> tuple[tuple[Array, KVCache], None]:
            x, kv = carry
            layer_params, layer = scanned
            this = nnx.merge(graph, layer_params)
            return this(x, kv, layer, context, implementation=implementation), None

        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (x, kv), _ = lax.scan(block, (self.embed(step.token_ids), kv), (params, layers))
        return self.norm(x), kv

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """f32 logits over the vocabulary of rows that `__call__` returned."""
        head = self.embed if self.head is None else self.head
        return head.logits(hidden)


def param_specs(config: ModelConfig, axis: str = "tp") -> Any:
    """How to cut the parameters over mesh axis `axis`: an `nnx.State` of `PartitionSpec`, as `nnx.state(model)`.

    KV heads, the inner width of the MLP and the vocabulary are cut; the mesh axis must divide all three. The KV
    array goes with them: `PartitionSpec(None, None, axis)` for `data` and `scales` alike.
    """
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))

    def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        names = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        return next((PartitionSpec(*cut) for tail, cut in cuts.items() if _has_tail(names, tail)), PartitionSpec())

    cuts = {
        ("embed", "table"): (axis,),
        ("head", "table"): (axis,),
        ("qkv", "w"): (None, None, axis),
        ("qkv", "b"): (None, axis),
        ("out", "w"): (None, axis),
        ("gate_up", "w"): (None, None, None, axis),
        ("gate_up", "b"): (None, None, axis),
        ("down", "w"): (None, axis),
    }
    return jax.tree.map_with_path(spec, nnx.state(model, nnx.Param))


def _has_tail(names: tuple[str, ...], tail: tuple[str, str]) -> bool:
    found = [name for name in names if name != "value"]
    return tuple(found[-2:]) == tail

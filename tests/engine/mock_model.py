"""A tiny model that the engine runs in milliseconds, whose every token depends on all KV before it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.engine import Engine
from jaxcache.kernels import KVCache, StepInputs
from jaxcache.kernels.kv_write import write_kv
from jaxcache.kernels.paged_attention import paged_attention


@dataclass(frozen=True)
class MockConfig:
    vocab_size: int = 97
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    max_position: int = 512
    causal: bool = True


class MockModel(nnx.Module):
    """Two layers of attention with large random weights, so that another prefix gives other tokens."""

    def __init__(self, config: MockConfig, seed: int = 0) -> None:
        self.config = config
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        rng = np.random.default_rng(seed)

        def weights(*shape):
            return nnx.Param(jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-2] ** 0.5, jnp.float32))

        self.embed = weights(config.vocab_size, width)
        self.place = weights(config.max_position, width)
        self.q = weights(config.num_layers, width, width)
        self.k = weights(config.num_layers, width, kv_width)
        self.v = weights(config.num_layers, width, kv_width)
        self.o = weights(config.num_layers, width, width)
        self.head = weights(width, config.vocab_size)

    def __call__(
        self, step: StepInputs, kv: KVCache, implementation: str | None = None
    ) -> tuple[jax.Array, KVCache]:
        config, rows = self.config, step.token_ids.shape[0]
        x = 3 * self.embed[...][step.token_ids] + self.place[...][step.positions]

        def layer(carry, weights):
            x, kv = carry
            index, q, k, v, o = weights
            q = (x @ q).reshape(rows, config.num_heads, config.head_dim)
            k = (x @ k).reshape(rows, config.num_kv_heads, config.head_dim)
            v = (x @ v).reshape(rows, config.num_kv_heads, config.head_dim)
            kv = write_kv(kv, index, k, v, step.slot_mapping, implementation=implementation)
            attended = paged_attention(2 * q, kv, index, step, implementation=implementation)
            return (jnp.tanh(x + attended.reshape(rows, -1) @ o), kv), None

        layers = jnp.arange(config.num_layers, dtype=jnp.int32), self.q[...], self.k[...], self.v[...], self.o[...]
        return jax.lax.scan(layer, (x, kv), layers)[0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        return 8 * hidden @ self.head[...]


def make_engine(config: MockConfig = MockConfig(), **options) -> Engine:
    return Engine(MockModel(config), config, **options)

"""A tiny model that the engine runs in milliseconds, whose every token depends on all KV before it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
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
        keys = jax.random.split(jax.random.key(seed), 7)

        def weights(key, *shape):
            return nnx.Param(jax.random.normal(key, shape, jnp.float32) / shape[-2] ** 0.5)

        self.embed = weights(keys[0], config.vocab_size, width)
        self.place = weights(keys[1], config.max_position, width)
        self.q = weights(keys[2], config.num_layers, width, width)
        self.k = weights(keys[3], config.num_layers, width, kv_width)
        self.v = weights(keys[4], config.num_layers, width, kv_width)
        self.o = weights(keys[5], config.num_layers, width, width)
        self.head = weights(keys[6], width, config.vocab_size)

    def __call__(
        self, step: StepInputs, kv: KVCache, implementation: str | None = None
    ) -> tuple[jax.Array, KVCache]:
        config, rows = self.config, step.token_ids.shape[0]
        x = 3 * self.embed[...][step.token_ids] + self.place[...][step.positions]
        for layer in range(config.num_layers):
            q = (x @ self.q[layer]).reshape(rows, config.num_heads, config.head_dim)
            k = (x @ self.k[layer]).reshape(rows, config.num_kv_heads, config.head_dim)
            v = (x @ self.v[layer]).reshape(rows, config.num_kv_heads, config.head_dim)
            kv = write_kv(kv, layer, k, v, step.slot_mapping, implementation=implementation)
            attended = paged_attention(2 * q, kv, layer, step, implementation=implementation)
            x = jnp.tanh(x + attended.reshape(rows, -1) @ self.o[layer])
        return x, kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        return 8 * hidden @ self.head[...]


def make_engine(config: MockConfig = MockConfig(), **options) -> Engine:
    return Engine(MockModel(config), config, **options)

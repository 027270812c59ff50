"""Prefix caching in one's own Flax model, under one's own jit: the cache plans, two device functions do the rest.

Run: python examples/own_flax_model.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxcache as jc

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 256, 8, 4, 64, 2


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, WIDTH, rngs=rngs)

    def __call__(
        self, x: jax.Array, kv: jc.KVCache, layer: int, step: jc.StepInputs
    ) -> tuple[jax.Array, jc.KVCache]:
        heads = self.qkv(x).reshape(x.shape[0], -1, HEAD_DIM)
        q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        kv = jc.write_kv(kv, layer, k, v, step.slot_mapping)
        attended = jc.paged_attention(q, kv, layer, step)
        return self.out(attended.reshape(x.shape[0], -1)), kv


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.place = nnx.Embed(512, WIDTH, rngs=rngs)
        self.layers = nnx.List([Attention(rngs) for _ in range(LAYERS)])

    def __call__(self, kv: jc.KVCache, step: jc.StepInputs) -> tuple[jax.Array, jc.KVCache]:
        x = self.embed(step.token_ids) + self.place(step.positions)
        for layer, attention in enumerate(self.layers):
            attended, kv = attention(x, kv, layer, step)
            x = jnp.tanh(x + attended)
        return self.embed.attend(x[step.logits_rows]), kv


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="kv")
def forward(
    graphdef: nnx.GraphDef, params: nnx.State, kv: jc.KVCache, step: jc.StepInputs
) -> tuple[jax.Array, jc.KVCache]:
    logits, kv = nnx.merge(graphdef, params)(kv, step)
    return jnp.argmax(logits, axis=-1), kv


def main() -> None:
    graphdef, params = nnx.split(Model(nnx.Rngs(0)))
    config = jc.CacheConfig(num_blocks=64, block_size=16)
    cache = jc.PrefixCache(config)
    kv = jc.init_kv(config, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32)

    instructions = list(b"You answer questions about the sea, in one short sentence. ")
    for question in (b"How deep is it?", b"Why is it salty?", b"Who owns it?"):
        with cache.open(instructions + list(question)) as sequence:
            computed = sequence.num_tokens - sequence.num_cached_tokens
            for _ in range(8):
                tokens, kv = forward(graphdef, params, kv, cache.step_inputs([sequence]))
                cache.commit(sequence, int(np.asarray(tokens)[0]))
            print(
                f"{question.decode():18} {sequence.num_cached_tokens:3} tokens cached, {computed:3} computed, "
                f"blocks {sequence.block_ids}, next tokens {sequence.token_ids[-8:]}"
            )
    print(
        f"{cache.num_free_blocks} of {config.num_blocks} blocks free; what was full stays findable until evicted"
    )


if __name__ == "__main__":
    main()

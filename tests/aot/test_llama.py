"""A whole jitted step of Llama 3 8B (8 of its 32 layers: all do not fit on one v5e), alone and cut over a 2 x 2
mesh: the KV array is updated where it lies."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("needs libtpu: pip install -e '.[aot]'", allow_module_level=True)

from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcache.kernels import KVCache, KVLayout
from jaxcache.kernels.check.abstract import DECODE, MIXED, kv_array, num_bytes, step_inputs
from jaxcache.kernels.check.targets import TPU_TOPOLOGIES, devices
from jaxcache.kernels.dispatch import Tpu
from jaxcache.models.config import ModelConfig
from jaxcache.models.llama import Llama, param_specs
from jaxcache.models.rope import RopeConfig

CONFIG = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=8,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
    tie_embeddings=False,
    max_position=8192,
)

TEMP_BYTES = 512 * 2**20
"""Activations, logits of 64 rows in f32 (31 MiB) and packed queries; the KV array alone has 2 GiB."""

REORDERED_WEIGHTS = 0.25
"""Share of the weights that XLA may hold once more, in an order that it likes better (on tpu7x it does)."""


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
@pytest.mark.parametrize("chips", [1, 4])
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
def test_step(target, chips, rows):
    on = devices(target)[:chips]
    mesh = Mesh(on, ("tp",))
    implementation = Tpu(device_kind=on[0].device_kind, head_axis="tp")
    abstract = nnx.eval_shape(lambda: Llama(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graphdef, params = nnx.split(abstract)

    def step(params, kv, step):
        model = nnx.merge(graphdef, params)
        hidden, kv = model(step, kv, implementation=implementation)
        return jnp.argmax(model.logits(hidden[step.logits_rows]), axis=-1), kv

    def placed(tree, specs):
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
            tree,
            specs,
        )

    kv, inputs = kv_array(KVLayout(8, 128, 16), "bfloat16", CONFIG.num_layers), step_inputs(*rows)
    arguments = (
        placed(params, param_specs(CONFIG)),
        placed(kv, KVCache(P(None, None, "tp"))),
        placed(inputs, jax.tree.map(lambda _: P(), inputs)),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=1).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(kv) // chips
    assert memory.temp_size_in_bytes <= TEMP_BYTES + REORDERED_WEIGHTS * num_bytes(params) / chips
    shape = f"[{CONFIG.num_layers},{kv.data.shape[1]},"
    assert not [line for line in compiled.as_text().splitlines() if shape in line and " copy" in line]

"""The TPU kernels compile for every current TPU, keep the KV array in place and need little memory beside it.

    pip install -e '.[test,aot]' && pytest tests/aot

libtpu compiles without a TPU; nothing is run.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("needs libtpu: pip install -e '.[aot]'", allow_module_level=True)

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcache.kernels import KVLayout, StepInputs
from jaxcache.kernels.check.abstract import (
    DECODE,
    LAYERS,
    MIXED,
    TEMP_BYTES,
    faults,
    kv_array,
    num_bytes,
    step_inputs,
)
from jaxcache.kernels.check.targets import TPU_TOPOLOGIES, compile_for, devices
from jaxcache.kernels.dispatch import Tpu
from jaxcache.kernels.kv_write import write_kv
from jaxcache.kernels.paged_attention import paged_attention, write_and_attend
from jaxcache.kernels.paged_attention.shapes import SHAPES, AttentionShape


def compile_step(
    target: str, shape: AttentionShape, step: StepInputs, *, kv_dtype="bfloat16", block_size=16, soft_cap=None
):
    layout = KVLayout(shape.kv_heads, shape.head_dim, block_size)
    kv = kv_array(layout, kv_dtype)
    rows, dtype = step.token_ids.shape[0], jnp.float32 if kv_dtype == "float32" else jnp.bfloat16
    q = jax.ShapeDtypeStruct((rows, shape.heads, shape.head_dim), dtype)
    k = jax.ShapeDtypeStruct((rows, shape.kv_heads, shape.head_dim), dtype)
    sinks = jax.ShapeDtypeStruct((shape.heads,), jnp.float32) if shape.sinks else None
    tpu = Tpu(device_kind=devices(target)[0].device_kind)

    def run(kv, q, k, v, layer, step, sinks):
        options = {"sliding_window": shape.sliding_window, "soft_cap": soft_cap, "sinks": sinks}
        return write_and_attend(q, k, v, kv, layer, step, implementation=tpu, **options)

    layer = jax.ShapeDtypeStruct((), jnp.int32)
    return compile_for(target, run, kv, q, k, k, layer, step, sinks, donate=(0,)), kv


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_models(target, rows, shape):
    assert not faults(*compile_step(target, shape, step_inputs(*rows)))


FORMATS = [
    ("float32", 16, 128),
    ("float8_e4m3fn", 16, 128),
    ("float8_e5m2", 32, 128),
    ("int8", 16, 128),
    ("int8", 64, 64),
    ("int8", 256, 128),
    ("bfloat16", 8, 128),
    ("bfloat16", 256, 64),
    ("bfloat16", 16, 80),
    ("bfloat16", 16, 96),
]


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
@pytest.mark.parametrize(("kv_dtype", "block_size", "head_dim"), FORMATS)
def test_formats(target, kv_dtype, block_size, head_dim):
    shape = AttentionShape(16, 8, head_dim)
    assert not faults(*compile_step(target, shape, step_inputs(*MIXED), kv_dtype=kv_dtype, block_size=block_size))


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
def test_all_options(target):
    shape = AttentionShape(32, 8, 128, sliding_window=1024, sinks=True)
    assert not faults(*compile_step(target, shape, step_inputs(*MIXED), kv_dtype="int8", soft_cap=50.0))


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
def test_write_then_attend(target):
    """The two calls of a model that does not know `write_and_attend`."""
    layout = KVLayout(8, 128, 16)
    kv, step = kv_array(layout, "bfloat16"), step_inputs(*MIXED)
    q, k = (jax.ShapeDtypeStruct((MIXED[0], heads, 128), jnp.bfloat16) for heads in (32, 8))
    tpu = Tpu(device_kind=devices(target)[0].device_kind)

    def run(kv, q, k, v, step):
        kv = write_kv(kv, 1, k, v, step.slot_mapping, implementation=tpu)
        return paged_attention(q, kv, 1, step, implementation=tpu), kv

    assert not faults(compile_for(target, run, kv, q, k, k, step, donate=(0,)), kv)


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
def test_scan_over_layers_on_four_devices(target):
    """Heads cut over a 2 x 2 mesh, the KV array carried through a scan over the layers."""
    chips = devices(target)[:4]
    mesh = Mesh(chips, ("tp",))
    kv, step = kv_array(KVLayout(8, 128, 16), "bfloat16"), step_inputs(*MIXED)
    q, k = (jax.ShapeDtypeStruct((MIXED[0], heads, 128), jnp.bfloat16) for heads in (32, 8))
    tpu = Tpu(device_kind=chips[0].device_kind, head_axis="tp")

    def run(kv, q, k, v, step):
        def layer(carry, index):
            q, kv = carry
            out, kv = write_and_attend(q, k, v, kv, index, step, implementation=tpu)
            return (q + out, kv), None

        return jax.lax.scan(layer, (q, kv), jnp.arange(LAYERS, dtype=jnp.int32))[0]

    def placed(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    arguments = (
        placed(kv, P(None, None, "tp")),
        *(placed(x, P(None, "tp")) for x in (q, k, k)),
        placed(step, P()),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(run, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(kv) // 4
    assert memory.temp_size_in_bytes <= TEMP_BYTES
    assert not [line for line in compiled.as_text().splitlines() if "all-gather" in line and "bf16[4," in line]

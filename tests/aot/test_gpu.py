"""The GPU kernels compile for NVIDIA's GPUs, by XLA, Triton and ptxas, keep the KV array in place and need little
memory beside it.

    make aot-gpu

No GPU is needed; nothing is run.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxcache.kernels import KVLayout, StepInputs
from jaxcache.kernels.check.abstract import DECODE, MIXED, faults, kv_array, step_inputs
from jaxcache.kernels.check.targets import GPU_SPECS, can_compile_for, compile_for
from jaxcache.kernels.dispatch import Gpu
from jaxcache.kernels.paged_attention import write_and_attend
from jaxcache.kernels.paged_attention.shapes import SHAPES, AttentionShape

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
if not can_compile_for("cuda"):
    pytest.skip("needs JAX's CUDA plugin: make aot-gpu", allow_module_level=True)


def compile_step(
    target: str,
    shape: AttentionShape,
    step: StepInputs,
    *,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    block_size=16,
    soft_cap=None,
):
    kv = kv_array(KVLayout(shape.kv_heads, shape.head_dim, block_size), kv_dtype)
    rows, dtype = step.token_ids.shape[0], jnp.dtype(dtype)
    q = jax.ShapeDtypeStruct((rows, shape.heads, shape.head_dim), dtype)
    k = jax.ShapeDtypeStruct((rows, shape.kv_heads, shape.head_dim), dtype)
    sinks = jax.ShapeDtypeStruct((shape.heads,), jnp.float32) if shape.sinks else None
    gpu = Gpu(device_kind=GPU_SPECS[target].device_kind)

    def run(kv, q, k, v, layer, step, sinks):
        options = {"sliding_window": shape.sliding_window, "soft_cap": soft_cap, "sinks": sinks}
        return write_and_attend(q, k, v, kv, layer, step, implementation=gpu, **options)

    layer = jax.ShapeDtypeStruct((), jnp.int32)
    return compile_for(target, run, kv, q, k, k, layer, step, sinks, donate=(0,)), kv


@pytest.mark.parametrize("target", GPU_SPECS)
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_models(target, rows, shape):
    compiled, kv = compile_step(target, shape, step_inputs(*rows))
    assert not faults(compiled, kv)
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == (rows is MIXED) + 1


FORMATS = [
    ("float32", "float32", 16, 128),
    ("float32", "bfloat16", 16, 128),
    ("float16", "float16", 16, 256),
    ("bfloat16", "float8_e5m2", 32, 128),
    ("float16", "float8_e5m2", 16, 256),
    ("bfloat16", "int8", 64, 64),
    ("float16", "int8", 256, 128),
    ("bfloat16", "bfloat16", 8, 80),
    ("bfloat16", "bfloat16", 48, 96),
]


@pytest.mark.parametrize("target", GPU_SPECS)
@pytest.mark.parametrize(("dtype", "kv_dtype", "block_size", "head_dim"), FORMATS)
def test_formats(target, dtype, kv_dtype, block_size, head_dim):
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "block_size": block_size}
    assert not faults(*compile_step(target, AttentionShape(16, 8, head_dim), step_inputs(*MIXED), **options))


E4M3 = {"shape": AttentionShape(16, 8, 128), "step": step_inputs(*MIXED), "kv_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize("target", [name for name, spec in GPU_SPECS.items() if spec.capability >= (8, 9)])
def test_e4m3(target):
    assert not faults(*compile_step(target, **E4M3))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="takes an absent GPU for a newer one, and Triton aborts"
)
def test_e4m3_needs_compute_capability_8_9():
    with pytest.raises(NotImplementedError, match="cannot cast from `float8_e4m3fn`"):
        compile_step("a100", **E4M3)


@pytest.mark.parametrize("target", GPU_SPECS)
def test_all_options(target):
    shape = AttentionShape(32, 8, 128, sliding_window=1024, sinks=True)
    assert not faults(*compile_step(target, shape, step_inputs(*MIXED), kv_dtype="int8", soft_cap=50.0))

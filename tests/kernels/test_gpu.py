"""The GPU kernels beyond the common suite: shapes of models, splits and their merge, lowering without a GPU.

They run in Pallas's interpreter here. `tests/aot/test_gpu.py` compiles them down to machine code.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxcache.kernels import KVCache, KVLayout, init_kv
from jaxcache.kernels.dispatch import Gpu
from jaxcache.kernels.kv_write import write_kv
from jaxcache.kernels.paged_attention import gpu_kernel, paged_attention, write_and_attend
from jaxcache.kernels.paged_attention.gpu import num_splits
from tests.kernels.scenes import LAYER, Scene
from tests.kernels.test_paged_attention import SMALL, TOLERANCE, attend, check

HERE = Gpu(interpret=True)
CUT_SMALL = Gpu(tuning=SMALL, interpret=True)

SHAPES = {
    "head_dim 80, MHA": {"heads": 12, "kv_heads": 12, "head_dim": 80},
    "head_dim 96": {"heads": 6, "kv_heads": 2, "head_dim": 96},
    "head_dim 256, MQA": {"heads": 3, "kv_heads": 1, "head_dim": 256},
    "14/2 heads": {"heads": 14, "kv_heads": 2, "head_dim": 64},
    "a group larger than a tile": {"heads": 40, "kv_heads": 1, "head_dim": 64},
    "head_dim 8": {"heads": 2, "kv_heads": 1, "head_dim": 8},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_as_shipped(shape):
    """With the tile sizes on file."""
    check(Scene([(260, 1), (140, 8), (15, 1)], **shape), HERE)


@pytest.mark.parametrize("block_size", [8, 256])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_block_sizes(block_size, kv_dtype):
    scene = Scene([(270, 1), (250, 30)], head_dim=128, block_size=block_size, kv_dtype=kv_dtype)
    check(scene, CUT_SMALL, coarsest=kv_dtype)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}], ids=["all keys", "window"])
def test_splits_do_not_change_the_result(options):
    """A context cut into 1, 3 and 10 parts, some of them empty for the shorter sequences."""
    scene = Scene([(300, 1), (40, 1), (0, 1)], padding=(2, 1, 0))
    sinks = jnp.array([0.5, -3.0, 6.0, 0.0])
    for programs, split_tokens in ((1, 16), (24, 16), (80, 16)):
        tuning = type(SMALL)(**(vars(SMALL) | {"decode_programs": programs, "split_tokens": split_tokens}))
        check(scene, Gpu(tuning=tuning, interpret=True), sinks=sinks, **options)


def test_splits_fill_the_device():
    plan = functools.partial(gpu_kernel.Plan, group=1, rows=16, chunk=16, dtype=jnp.float32, scale=1.0, cap=None)
    plan = functools.partial(plan, layout=KVLayout(8, 64, 16), warps=4, stages=1)
    tuning = type(SMALL)(**(vars(SMALL) | {"decode_programs": 512, "split_tokens": 256}))
    assert num_splits((1, 8192), plan(window=None), tuning) == 64
    assert num_splits((64, 8192), plan(window=None), tuning) == 1
    assert num_splits((1, 32), plan(window=None), tuning) == 2  # no fewer than 256 tokens each
    assert num_splits((1, 8192), plan(window=300), tuning) == 2


def test_writing_and_attending_in_one_call():
    scene = Scene([(33, 1), (10, 20)], kv_dtype="bfloat16", dtype="bfloat16", head_dim=128)
    rows = [(before, new, kv) for (before, new), kv in zip(scene.lengths, scene.kv_rows)]
    k, v = (
        jnp.asarray(np.concatenate([kv[i][before : before + new] for before, new, kv in rows]), jnp.bfloat16)
        for i in range(2)
    )
    wanted = scene.full_kv("reference")
    nan = jnp.full_like(k, jnp.nan)
    kv = write_kv(wanted, LAYER, nan, nan, scene.step.slot_mapping)
    call = jax.jit(functools.partial(write_and_attend, layer=LAYER, implementation=CUT_SMALL))
    out, kv = call(scene.queries(), k, v, kv, step=scene.step)
    assert np.abs(np.asarray(out, np.float32) - scene.dense()).max() <= TOLERANCE["bfloat16"]
    np.testing.assert_array_equal(*(np.asarray(x.data, np.float32) for x in (kv, wanted)))


def test_heads_cut_over_two_devices():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    scene = Scene([(70, 1), (20, 33)], kv_dtype="int8", head_dim=64)
    options = {"sinks": jnp.array([0.5, -3.0, 6.0, 0.0])}
    whole = attend(scene, CUT_SMALL, **options)
    with jax.set_mesh(mesh):
        cut = attend(scene, Gpu(tuning=SMALL, head_axis="tp", interpret=True), **options)
    np.testing.assert_array_equal(cut, whole)


class TestControls:
    """The harness notices what it is there to notice."""

    @pytest.mark.parametrize("lengths", [[(40, 1)], [(40, 20)]], ids=["decode", "prefill"])
    def test_wrong_mask(self, monkeypatch, lengths):
        right = gpu_kernel._mask
        monkeypatch.setattr(gpu_kernel, "_mask", lambda *given: jnp.roll(right(*given), 1, axis=1))
        with pytest.raises(AssertionError):
            check(Scene(lengths), HERE)

    def test_splits_not_weighted(self, monkeypatch):
        monkeypatch.setattr(
            gpu_kernel, "merge", lambda parts: jnp.sum(parts.out, axis=0) / jnp.sum(parts.total, axis=0)[..., None]
        )
        with pytest.raises(AssertionError):
            check(Scene([(600, 1)]), CUT_SMALL)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
class TestLowering:
    """For cuda, without a GPU. What Triton cannot express shows here: sizes, dtypes, operations."""

    def lower(self, scene: Scene, **options) -> str:
        kv = scene.empty_kv()
        call = functools.partial(paged_attention, layer=LAYER, implementation="gpu", **options)
        kind = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), axis_types=(), abstract_device=kind)):
            traced = jax.jit(lambda q, kv, step: call(q, kv, step=step)).trace(scene.queries(), kv, scene.step)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    @pytest.mark.parametrize(
        "kv_dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"]
    )
    def test_dtypes(self, kv_dtype):
        dtype = "float32" if kv_dtype == "float32" else "bfloat16"
        text = self.lower(Scene([(70, 1), (20, 33)], head_dim=128, dtype=dtype, kv_dtype=kv_dtype))
        assert text.count("__gpu$xla.gpu.triton") == 2
        for name in ("paged_attention_prefill", "paged_attention_decode"):
            assert name in text

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_shapes_and_options(self, shape):
        scene = Scene([(70, 1), (20, 33)], dtype="bfloat16", kv_dtype="bfloat16", **shape)
        sinks = jnp.zeros(scene.heads)
        text = self.lower(scene, sliding_window=20, soft_cap=30.0, sinks=sinks)
        assert text.count("__gpu$xla.gpu.triton") == 2

    def test_decodes_alone_are_one_kernel(self):
        assert self.lower(Scene([(70, 1), (20, 1)])).count("__gpu$xla.gpu.triton") == 1


class TestBadInput:
    def test_another_platform(self):
        scene = Scene([(3, 1)])
        with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):
            attend(scene, "gpu")

    def test_wide_heads(self):
        scene = Scene([(3, 1)], head_dim=512)
        with pytest.raises(ValueError, match="head dims up to 256, got 512"):
            attend(scene, HERE)

    @pytest.mark.parametrize(("gib", "refused"), [(1, False), (3, True), (5, False)])
    def test_addresses_of_32_bits(self, gib, refused):
        scene = Scene([(3, 1)], head_dim=128)
        layout = KVLayout(scene.kv_heads, 128, 16)
        blocks = gib * 2**30 // layout.block_bytes(1, "float8_e4m3fn")
        kv = jax.eval_shape(functools.partial(init_kv, layout, 1, blocks, "float8_e4m3fn"))

        def run(kv: KVCache):
            return paged_attention(scene.queries(), kv, 0, scene.step, implementation="gpu")

        if refused:
            with pytest.raises(ValueError, match="between 2 and 4 GiB"):
                jax.eval_shape(run, kv)
        else:
            jax.eval_shape(run, kv)

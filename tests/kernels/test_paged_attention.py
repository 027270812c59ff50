"""Every backend against dense attention in numpy: one suite, one table of tolerances."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.kernels import KVCache
from jaxcache.kernels.dispatch import Gpu, Implementation
from jaxcache.kernels.paged_attention import paged_attention
from jaxcache.kernels.tuning import GpuTuning
from tests.kernels.scenes import LAYER, Scene

SMALL = GpuTuning(
    prefill_rows=32,
    prefill_chunk=32,
    prefill_warps=4,
    prefill_stages=2,
    decode_chunk=16,
    decode_warps=4,
    decode_stages=2,
    decode_programs=64,
    split_tokens=48,
)
"""Small tiles and chunks and several splits within a few hundred tokens."""

IMPLEMENTATIONS = ("reference", "xla", pytest.param(Gpu(tuning=SMALL, interpret=True), id="gpu"))
"""The TPU kernels, which need another harness, are in `test_tpu.py`."""

TOLERANCE = {
    "float32": 2e-6,
    "bfloat16": 3e-2,
    "float16": 4e-3,
    "float8_e4m3fn": 1.5e-1,
    "float8_e5m2": 3e-1,
    "int8": 3e-2,
}
"""Largest absolute error of an output (values of KV are standard normal), by the coarsest dtype on the way."""

SHAPES = {
    "mha": {"heads": 4, "kv_heads": 4, "head_dim": 16},
    "gqa, odd heads": {"heads": 9, "kv_heads": 3, "head_dim": 64},
    "mqa, wide": {"heads": 4, "kv_heads": 1, "head_dim": 256},
    "planes": {"heads": 4, "kv_heads": 2, "head_dim": 128},
    "not a power of two": {"heads": 6, "kv_heads": 2, "head_dim": 80},
}

LENGTHS = {
    "one token": [(0, 1)],
    "one prefill": [(0, 37)],
    "decodes": [(5, 1), (300, 1), (16, 1), (0, 1)],
    "chunk behind a cached prefix": [(272, 50)],
    "mixed, one over several tiles and groups": [(530, 1), (0, 300), (33, 1), (290, 3), (256, 1)],
}


def attend(scene: Scene, implementation: Implementation, **options) -> np.ndarray:
    call = functools.partial(paged_attention, layer=LAYER, implementation=implementation, **options)
    out = jax.jit(lambda q, kv, step: call(q, kv, step=step))(scene.queries(), scene.full_kv(), scene.step)
    assert out.dtype == scene.queries().dtype
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all()
    return out[: scene.num_rows]


def check(scene: Scene, implementation: Implementation, coarsest: str = "float32", **options) -> None:
    out = attend(scene, implementation, **options)
    worst = np.abs(out - scene.dense(**options)).max()
    assert worst <= TOLERANCE[coarsest], f"largest error {worst}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(lengths, implementation):
    check(Scene(lengths, padding=(7, 2, 3)), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, implementation):
    check(Scene([(40, 1), (20, 30)], **shape), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [1, 4, 48, 512])
def test_block_sizes(block_size, implementation):
    check(Scene([(270, 1), (250, 30)], block_size=block_size), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tile_size", [8, 100, 256])
def test_tile_sizes(tile_size, implementation):
    check(Scene([(3, 1), (10, 290), (0, 9)], tile_size=tile_size), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 16},
        {"sliding_window": 100},
        {"soft_cap": 0.7},
        {"sm_scale": 0.5},
        {"sinks": np.array([0.5, -3.0, 6.0, 0.0], np.float32)},
        {"sliding_window": 50, "soft_cap": 2.0, "sinks": np.ones(4, np.float32), "sm_scale": 0.2},
    ],
    ids=lambda options: ",".join(options),
)
def test_options(options, implementation):
    scene = Scene([(600, 1), (300, 140), (2, 1)], padding=(3, 1, 1))
    if "sinks" in options:
        options = options | {"sinks": jnp.asarray(options["sinks"])}
    check(scene, implementation, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim"),
    [
        ("bfloat16", "bfloat16", 64),
        ("float16", "float16", 128),
        ("float32", "bfloat16", 128),
        ("bfloat16", "float32", 64),
        ("float16", "bfloat16", 64),
        ("float32", "float8_e4m3fn", 64),
        ("bfloat16", "float8_e5m2", 128),
        ("float32", "int8", 64),
        ("float32", "int8", 128),
        ("bfloat16", "int8", 128),
    ],
)
def test_dtypes(dtype, kv_dtype, head_dim, implementation):
    scene = Scene([(70, 1), (20, 33)], dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim)
    check(scene, implementation, coarsest=max(dtype, kv_dtype, key=TOLERANCE.__getitem__))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shared_blocks(implementation):
    check(Scene([(64, 1), (70, 20), (64, 1)], shared_blocks=4), implementation)


SHARED = [(200, 1), (160, 1), (500, 1), (161, 1), (300, 1)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "runs",
    [[(10, [0, 1, 2, 3, 4])], [(10, [0, 3])], [(9, [0, 2]), (4, [1, 4])], []],
    ids=["all", "some", "two runs", "none"],
)
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 90, "soft_cap": 2.0, "sinks": True}], ids=["plain", "all"]
)
def test_shared_runs(runs, options, implementation):
    """Read once for all members or, where a backend ignores the hint, as ever."""
    scene = Scene(SHARED, shared_blocks=10, padding=(2, 2, 0), kv_dtype="float32")
    if "sinks" in options:
        options = options | {"sinks": jnp.array([0.5, -3.0, 6.0, 0.0])}
    scene.share(runs)
    check(scene, implementation, **options)


@pytest.mark.parametrize("shape", [{"heads": 9, "kv_heads": 3, "head_dim": 64}, {"head_dim": 128}])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_shared_runs_of_narrow_kv(shape, kv_dtype):
    scene = Scene(SHARED, shared_blocks=10, dtype="bfloat16", kv_dtype=kv_dtype, **shape)
    scene.share([(10, [0, 1, 2, 3, 4])])
    check(scene, "xla", coarsest=kv_dtype)


def test_a_shared_run_is_read_in_place_of_the_members_tables():
    scene = Scene(SHARED, shared_blocks=10)
    scene.share([(10, [0, 1, 2, 3, 4])])
    expected = attend(scene, "xla")
    elsewhere = scene.step.block_tables.at[:, :10].set(scene.step.block_tables[2:3, 10:20])
    scene.step = scene.step._replace(block_tables=elsewhere)
    np.testing.assert_array_equal(attend(scene, "xla"), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_window_over_blocks_no_longer_held(implementation):
    scene = Scene([(500, 1), (400, 60)], unheld={0: 29, 1: 23})
    check(scene, implementation, sliding_window=20)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_out_of_range_are_not_read(implementation):
    """Neither clamped to the last block nor wrapped to it: the block counts as not held."""
    scene = Scene([(40, 1), (60, 1), (30, 20)], unheld={0: 1, 1: 1, 2: 1})
    entries = jnp.array([-1, scene.num_blocks, np.iinfo(np.int32).max], jnp.int32)[:, None]
    tables = jnp.where(scene.step.block_tables == 0, entries, scene.step.block_tables)
    absent = attend(scene, implementation)
    scene.step = scene.step._replace(block_tables=tables)
    foreign = attend(scene, implementation)
    np.testing.assert_array_equal(foreign, absent)


@pytest.mark.parametrize("layer", [0, 1])
def test_layer_may_be_traced(layer):
    scene = Scene([(20, 1), (0, 10)])
    kv = scene.full_kv()
    here = KVCache(jnp.roll(kv.data, layer - LAYER, axis=0))
    out = jax.jit(paged_attention)(scene.queries(), here, jnp.int32(layer), scene.step)
    np.testing.assert_allclose(out, scene.dense(), atol=TOLERANCE["float32"])


def test_none_is_an_implementation_that_works_here():
    scene = Scene([(0, 40), (20, 1)])
    np.testing.assert_array_equal(attend(scene, None), attend(scene, "xla"))


def test_result_does_not_depend_on_the_physical_blocks():
    outputs = [attend(Scene([(300, 1), (260, 40)], spare_blocks=spare), None) for spare in (0, 40)]
    np.testing.assert_array_equal(*outputs)


class TestErrors:
    scene = Scene([(20, 1), (0, 10)])

    def call(self, **changes):
        plain = inspect.unwrap(paged_attention)  # without the annotation check, which would speak first
        arguments = {"q": self.scene.queries(), "kv": self.scene.empty_kv(), "layer": 0, "step": self.scene.step}
        return plain(**(arguments | changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"implementation": "cuda"}, "paged_attention has no implementation 'cuda'.*'reference', 'xla'"),
            ({"q": jnp.zeros((11, 4))}, r"q must have 3 axes.*\(11, 4\)"),
            ({"q": jnp.zeros((11, 4, 16), jnp.int32)}, "q must be float32, bfloat16 or float16, got int32"),
            ({"q": jnp.zeros((11, 4, 32))}, "head_dim 32 needs 1 plane"),
            ({"q": jnp.zeros((11, 3, 16))}, "3 heads are no multiple of 2 KV heads"),
            ({"q": jnp.zeros((12, 4, 16))}, r"step.positions must have shape \(12,\)"),
            ({"layer": 2}, "layer 2 is not one of the 2 layers"),
            ({"layer": -1}, "layer -1 is not one"),
            ({"layer": 0.5}, "layer must be an integer, got 0.5"),
            ({"sliding_window": 0}, "sliding_window must be a positive number of tokens or None, got 0"),
            ({"soft_cap": 0.0}, "soft_cap must be a positive finite number or None, got 0.0"),
            ({"sm_scale": float("nan")}, "sm_scale must be a positive finite number"),
            ({"sinks": jnp.zeros(3)}, r"sinks must hold one logit per query head, shape \(4,\), got \(3,\)"),
        ],
    )
    def test_message(self, changes, message):
        with pytest.raises(ValueError, match=message):
            self.call(**changes)

    def test_scales_missing(self):
        kv = self.scene.empty_kv()
        with pytest.raises(ValueError, match=r"kv.scales must be .* for int8 KV, got None"):
            self.call(kv=KVCache(kv.data.astype(jnp.int8)))

    def test_step_of_another_batch(self):
        step = self.scene.step._replace(seq_lens=jnp.zeros(5, jnp.int32))
        with pytest.raises(ValueError, match=r"step.seq_lens must have shape \(2,\).*got \(5,\)"):
            self.call(step=step)

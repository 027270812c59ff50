"""The TPU kernels on a CPU, in Pallas's TPU interpreter: copies, semaphores and uninitialised memory included.

Both ways in which a copy may happen are tried: at its start (`eager`) and as late as its wait (`on_wait`). A
race between a copy and a read is an error in newer versions of JAX and a printed line in older ones.
Uninitialised memory and every slot that no row may read are NaN, so that reading one shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxcache.kernels import PAD_SLOT, KVCache, KVLayout, init_kv
from jaxcache.kernels.dispatch import Tpu
from jaxcache.kernels.kv_write import write_kv
from jaxcache.kernels.paged_attention import paged_attention, tpu_attend, tpu_ring, write_and_attend
from jaxcache.kernels.tuning import TpuTuning
from tests.kernels.scenes import LAYER, Scene

slow = pytest.mark.slow

TOLERANCE = {
    "float32": 2e-6,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 2e-2,
    "float8_e5m2": 2e-2,
    "int8": 3e-2,
}
"""Largest absolute error of an output, by KV dtype; values are standard normal."""

SMALL = TpuTuning(
    chunk=128,
    prefill_sizes=(128,),
    decode_sizes=(128,),
    prefill_rows=32,
    row_sum="lanes",
    depth=1,
    stacked_heads=4,
    decode_tiles=2,
)
"""Small chunks and tiles: every path of the kernel within a few hundred tokens."""

MODES = ("eager", "on_wait")

MIXED = [(300, 1), (385, 36), (0, 20), (31, 1), (128, 1), (100, 3), (0, 1)]
"""Contexts of several chunks, ends on and off a block and a chunk, prefills and decodes in turns."""

SHORT = [(260, 1), (140, 8), (15, 1)]

MANY = [(160 + i % 3 * 20, 1) for i in range(20)]
"""Decodes that share ten blocks and fill two tiles of a run."""


def tpu(mode: str = "on_wait", tuning: TpuTuning = SMALL) -> Tpu:
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan")
    return Tpu(tuning=tuning, interpret=params)


@pytest.fixture(autouse=True)
def no_race(capfd):
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def new_rows(scene: Scene) -> tuple[jax.Array, jax.Array]:
    """K and V of the step's rows; padding rows are NaN."""
    pairs = list(zip(scene.lengths, scene.kv_rows))
    k, v = (np.concatenate([rows[i][before : before + new] for (before, new), rows in pairs]) for i in range(2))
    padding = ((0, scene.q.shape[0] - scene.num_rows), (0, 0), (0, 0))
    k, v = (np.pad(x, padding, constant_values=np.nan) for x in (k, v))
    return jnp.asarray(k, jnp.dtype(scene.dtype)), jnp.asarray(v, jnp.dtype(scene.dtype))


def run(scene: Scene, implementation: Tpu, *, fused: bool = True, **options) -> None:
    """Write the new rows and attend; the KV array must come out as the reference writes it, the rest as dense."""
    k, v = new_rows(scene)
    wanted = scene.full_kv("reference")
    slots = scene.step.slot_mapping
    before = write_kv(wanted, LAYER, jnp.full_like(k, jnp.nan), jnp.full_like(v, jnp.nan), slots)

    @jax.jit
    def step(q, k, v, kv, step):
        if fused:
            return write_and_attend(q, k, v, kv, LAYER, step, implementation=implementation, **options)
        kv = write_kv(kv, LAYER, k, v, step.slot_mapping, implementation=implementation)
        return paged_attention(q, kv, LAYER, step, implementation=implementation, **options), kv

    out, kv = step(scene.queries(), k, v, before, scene.step)
    assert out.dtype == scene.queries().dtype
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all()
    worst = np.abs(out[: scene.num_rows] - expected(scene, wanted, **options)).max()
    assert worst <= TOLERANCE[scene.kv_dtype], f"largest error {worst}"
    assert_same(kv, wanted)


def expected(scene: Scene, kv: KVCache, **options) -> np.ndarray:
    """Dense attention over the scene's rows; over what 8-bit KV holds of them, by the reference."""
    if kv.data.dtype.itemsize > 1:
        return scene.dense(**options)
    queries = scene.queries().astype(jnp.float32)
    out = paged_attention(queries, kv, LAYER, scene.step, implementation="reference", **options)
    return np.asarray(out)[: scene.num_rows]


def assert_same(found: KVCache, wanted: KVCache) -> None:
    for name, array in wanted._asdict().items():
        if array is not None:
            np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (getattr(found, name), array)))


@pytest.mark.parametrize("mode", MODES)
def test_ragged_steps(mode):
    run(Scene(MIXED, heads=9, kv_heads=3, head_dim=64, shared_blocks=1, padding=(5, 3, 2)), tpu(mode))


@pytest.mark.parametrize("mode", MODES)
def test_decodes_alone(mode):
    lengths = [(300, 1), (127, 1), (128, 1), (0, 1), (400, 1)]
    run(Scene(lengths, head_dim=128, kv_dtype="bfloat16", dtype="bfloat16"), tpu(mode))


def test_prefills_alone():
    run(Scene([(0, 70), (390, 33)], head_dim=128, tile_size=64), tpu())


@pytest.mark.parametrize("mode", MODES)
def test_shared_runs(mode):
    """One of two tiles, one of two members with fewer blocks in common, and a decode and a prefill with none."""
    scene = Scene([*MANY, (160, 3)], heads=2, kv_heads=1, head_dim=64, shared_blocks=10, padding=(2, 3, 1))
    scene.share([(10, [n for n in range(20) if n not in (4, 9, 19)]), (8, [4, 19])])
    run(scene, tpu(mode))


def test_no_shared_run():
    scene = Scene(SHORT, shared_blocks=0)
    scene.share([])
    run(scene, tpu())


@pytest.mark.parametrize(
    ("kv_dtype", "options"),
    [
        ("bfloat16", {"sliding_window": 90}),
        ("int8", {"soft_cap": 0.7, "sinks": jnp.array([0.5, -3.0, 6.0, 0.0, 0.0, 1.0])}),
    ],
    ids=["bfloat16, window", "int8, soft cap, sinks"],
)
def test_shared_runs_with_options(kv_dtype, options):
    scene = Scene(MANY[:3], heads=6, head_dim=128, shared_blocks=10, kv_dtype=kv_dtype)
    scene.share([(10, [0, 1, 2])])
    run(scene, tpu(tuning=tuned(row_sum="matmul")), **options)


def test_a_shared_run_is_read_in_place_of_the_members_tables():
    scene = Scene(MANY[:3], heads=2, kv_heads=1, head_dim=128, shared_blocks=10)
    scene.share([(10, [0, 1, 2])])
    tables = scene.step.block_tables
    scene.step = scene.step._replace(block_tables=tables.at[:, :10].set(scene.unused[0]))
    run(scene, tpu())


def test_two_calls_do_what_one_does():
    run(Scene([(140, 1), (140, 8)], padding=(2, 0, 0)), tpu(), fused=False)


def test_a_step_of_padding_only():
    scene = Scene([(0, 1)], padding=(3, 2, 1))
    step = scene.step._replace(
        seq_lens=jnp.zeros_like(scene.step.seq_lens),
        query_start=jnp.zeros_like(scene.step.query_start),
        slot_mapping=jnp.full_like(scene.step.slot_mapping, PAD_SLOT),
    )
    kv = scene.empty_kv()
    k, v = new_rows(scene)
    call = jax.jit(functools.partial(write_and_attend, layer=LAYER, implementation=tpu()))
    out, after = call(scene.queries(), k, v, kv, step=step)
    assert not np.asarray(out).any()
    assert_same(after, kv)


OPTIONS = {
    "window within a block": {"sliding_window": 5},
    "window of several chunks": {"sliding_window": 250},
    "soft cap": {"soft_cap": 0.7},
    "sinks": {"sinks": np.array([0.5, -3.0, 6.0, 0.0], np.float32)},
    "all": {"sliding_window": 150, "soft_cap": 2.0, "sinks": np.ones(4, np.float32), "sm_scale": 0.2},
}


ONE_BY_ONE = ("window of several chunks", "soft cap", "sinks")
"""Of the options, those that "all" has as well."""


@pytest.mark.parametrize(
    "options", [pytest.param(OPTIONS[name], marks=slow if name in ONE_BY_ONE else (), id=name) for name in OPTIONS]
)
def test_options(options):
    unheld = {0: 280 // 16} if options.get("sliding_window") == 5 else {}
    if "sinks" in options:
        options = options | {"sinks": jnp.asarray(options["sinks"])}
    run(Scene([(330, 1), (300, 20), (2, 1)], unheld=unheld), tpu(), **options)


SHAPES = {
    "head_dim 80, MHA in two rounds of heads": {"heads": 12, "kv_heads": 12, "head_dim": 80},
    "head_dim 96": {"heads": 6, "kv_heads": 2, "head_dim": 96},
    "head_dim 256, MQA": {"heads": 3, "kv_heads": 1, "head_dim": 256},
    "14/2 heads": {"heads": 14, "kv_heads": 2, "head_dim": 64},
}


OF_THE_MATRIX = ("head_dim 96", "14/2 heads")
"""Of the shapes, those that are left to `test_matrix`."""


@pytest.mark.parametrize(
    "shape", [pytest.param(SHAPES[name], marks=slow if name in OF_THE_MATRIX else (), id=name) for name in SHAPES]
)
def test_shapes(shape):
    run(Scene(SHORT, **shape), tpu())


@pytest.mark.parametrize(
    ("kv_dtype", "shape"),
    [
        ("float8_e4m3fn", {"head_dim": 128}),
        pytest.param("float8_e5m2", {"block_size": 32}, marks=slow),
        ("int8", {"head_dim": 64, "heads": 9, "kv_heads": 3}),
        pytest.param("int8", {"head_dim": 128, "block_size": 64}, marks=slow),
    ],
)
def test_narrow_kv(kv_dtype, shape):
    run(Scene(SHORT, kv_dtype=kv_dtype, **shape), tpu())


@pytest.mark.parametrize(
    ("block_size", "chunk", "kv_dtype"),
    [
        (8, 128, "bfloat16"),
        (256, 256, "int8"),
        pytest.param(8, 128, "int8", marks=slow),
        pytest.param(256, 256, "bfloat16", marks=slow),
    ],
)
def test_block_sizes(block_size, chunk, kv_dtype):
    tuning = tuned(chunk=chunk, prefill_sizes=(chunk,), decode_sizes=(chunk,))
    run(Scene(SHORT, head_dim=128, block_size=block_size, kv_dtype=kv_dtype), tpu(tuning=tuning))


@pytest.mark.parametrize("kv_dtype", [pytest.param("float32", marks=slow), "int8"])
def test_row_sums_on_the_matrix_unit(kv_dtype):
    run(Scene(SHORT, head_dim=128, kv_dtype=kv_dtype), tpu(tuning=tuned(row_sum="matmul", depth=0)))


def test_sizes_of_a_chunk_that_is_not_full():
    tuning = tuned(chunk=256, prefill_sizes=(128, 256), decode_sizes=(128, 256))
    run(Scene([(270, 1), (120, 20), (100, 20)]), tpu(tuning=tuning))


def tuned(**changes) -> TpuTuning:
    return TpuTuning(**(vars(SMALL) | changes))


@slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [{"heads": 9, "kv_heads": 3, "head_dim": 64}, {"head_dim": 128}, *SHAPES.values()]
)
@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "all options"])
def test_matrix(mode, kv_dtype, shape, options):
    """Everything with everything, at the sizes that are shipped."""
    # One shared block, which the step's prefill writes first: a decode of MIXED would write the second.
    scene = Scene([*MIXED, (1400, 1), (2000, 100)], kv_dtype=kv_dtype, shared_blocks=1, padding=(5, 3, 2), **shape)
    if options:
        options = options | {"sinks": jnp.linspace(-2.0, 3.0, scene.heads)}
    params = tpu(mode).interpret
    run(scene, Tpu(device_kind="TPU v6 lite", interpret=params), **options)


class TestWrite:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("kv_dtype", "head_dim"), [("float32", 64), ("bfloat16", 128), ("int8", 80)])
    def test_rows_land_in_their_slots_and_nowhere_else(self, mode, kv_dtype, head_dim):
        """Whole blocks, parts of blocks in and out of order, one row alone, rows that go nowhere."""
        size, blocks, heads = 16, 12, 2
        slots = [
            *range(2 * size, 4 * size + 5),  # two whole blocks and the start of a third
            *range(5 * size + 3, 5 * size + 9),  # the middle of one
            *(7 * size + 4, 7 * size + 2, 7 * size + 3, 7 * size),  # one block, out of order
            9 * size + 15,
            *(PAD_SLOT, -1, 3, blocks * size),  # padding, negative, the null block, one past the array
            *range(11 * size, 12 * size),
        ]
        rng = np.random.default_rng(0)
        k, v = (jnp.asarray(rng.standard_normal((len(slots), heads, head_dim)), jnp.float32) for _ in range(2))
        kv = init_kv(KVLayout(heads, head_dim, size), 2, blocks, jnp.dtype(kv_dtype))
        write = functools.partial(write_kv, kv, 1, k, v, jnp.array(slots, jnp.int32))
        assert_same(jax.jit(lambda: write(implementation=tpu(mode)))(), write(implementation="reference"))

    def test_fewer_rows_than_a_block(self):
        k = jnp.ones((3, 1, 64))
        kv = init_kv(KVLayout(1, 64, 16), 1, 4, jnp.float32)
        write = functools.partial(write_kv, kv, 0, k, 2 * k, jnp.array([31, 32, 50], jnp.int32))
        assert_same(write(implementation=tpu()), write(implementation="reference"))


class TestControls:
    """The harness notices what it is there to notice."""

    def test_dropped_wait(self, monkeypatch):
        monkeypatch.setattr(tpu_ring.Ring, "wait_full", lambda ring, slot: None)
        with pytest.raises(AssertionError):
            run(Scene([(520, 1)]), tpu("on_wait"))

    def test_dropped_wait_for_the_written_block(self, monkeypatch):
        from jaxcache.kernels.paged_attention import tpu_kernel

        monkeypatch.setattr(tpu_kernel._RowWriter, "_wait", lambda writer: None)
        with pytest.raises(AssertionError):
            run(Scene([(40, 1), (70, 1)]), tpu("on_wait"))

    @pytest.mark.parametrize("lengths", [[(40, 1)], [(40, 20)]], ids=["decode", "prefill"])
    def test_wrong_mask(self, monkeypatch, lengths):
        right = tpu_attend.Visible.mask
        monkeypatch.setattr(tpu_attend.Visible, "mask", lambda *given: jnp.roll(right(*given), 1, axis=1))
        with pytest.raises(AssertionError):
            run(Scene(lengths), tpu())


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"block_size": 48}, "no block size 48: choose one of 8, 16, 32, 64, 128, 256"),
            ({"kv_dtype": "float16"}, "no KV dtype float16: choose one of float32, bfloat16"),
            ({"dtype": "float16"}, "takes float32 or bfloat16 queries, got float16"),
        ],
    )
    def test_unsupported(self, changes, message):
        scene = Scene([(3, 1)], **changes)
        with pytest.raises(ValueError, match=message):
            paged_attention(scene.queries(), scene.full_kv(), LAYER, scene.step, implementation="tpu")

    def test_rows_of_k_and_q(self):
        scene = Scene([(3, 1)], padding=(1, 0, 0))
        k, v = new_rows(scene)
        step = scene.step._replace(slot_mapping=scene.step.slot_mapping[:1])
        with pytest.raises(ValueError, match="q has 2 rows and k has 1"):
            write_and_attend(scene.queries(), k[:1], v[:1], scene.empty_kv(), LAYER, step, implementation="tpu")

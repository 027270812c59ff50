"""The hardware script on a machine without an accelerator, and its parts at small sizes."""

import dataclasses
import functools
import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.kernels import tuning
from jaxcache.kernels.check import __main__ as command
from jaxcache.kernels.check import aot, correctness, speed, tune
from jaxcache.kernels.check.correctness import Finding, compare
from jaxcache.kernels.check.peaks import PEAKS
from jaxcache.kernels.check.problem import Problem
from jaxcache.kernels.check.targets import can_compile_for
from jaxcache.kernels.dispatch import Gpu
from jaxcache.kernels.paged_attention import xla
from jaxcache.kernels.paged_attention.shapes import AttentionShape
from tests.kernels.test_paged_attention import SMALL

TINY = AttentionShape(4, 2, 16)
LENGTHS = ((5, 1), (0, 3), (20, 4))


@pytest.fixture
def few_tokens(monkeypatch):
    monkeypatch.setattr(correctness, "LENGTHS", LENGTHS)
    monkeypatch.setattr(correctness, "COMMON", 16)
    monkeypatch.setattr(correctness, "WITH_COMMON", ((16, 1), (20, 1), (17, 3)))


@pytest.mark.slow
def test_the_command_on_a_cpu(capsys, monkeypatch, few_tokens):
    monkeypatch.setattr(command, "CPU_DTYPES", (("bfloat16", "int8"),))
    assert command.main(["--parts", "correctness", "aot", "--shapes", "SmolLM2-135M"]) == 0
    text = capsys.readouterr().out
    assert "cannot be checked: results and races on hardware, speed, tile sizes" in text
    for backend in ("xla", "gpu, interpreted", "tpu, interpreted"):
        assert f"SmolLM2-135M, bfloat16 on int8 KV, {backend}: largest error" in text
    assert text.rstrip().endswith("all checks passed")


@pytest.mark.slow
def test_the_command_on_an_accelerator(capsys, monkeypatch, tmp_path, few_tokens):
    """All of what it does there, with a CPU that says it is a GPU, interpreted kernels and small steps."""
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    here = Gpu(tuning=SMALL, interpret=True)
    monkeypatch.setattr(command.jax, "devices", lambda: [device])
    monkeypatch.setattr(command, "_on_device", lambda platform, kind: here)
    monkeypatch.setattr(command, "DTYPES", (("bfloat16", "int8"),))
    monkeypatch.setattr(tune, "cost", lambda tried, field, shapes: float(tried.decode_warps != 2))
    for name, lengths in (("decode", ((40, 1), (9, 1))), ("prefill", ((0, 20),))):
        small = functools.partial(getattr(speed, name), lengths=lengths, repeats=1)
        monkeypatch.setattr(speed, name, functools.update_wrapper(small, getattr(speed, name)))
    assert command.main(["--shapes", "SmolLM2-135M", "--tuning-folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "SmolLM2-135M, bfloat16 on int8 KV, gpu: largest error" in text
    for backend in ("xla", "gpu"):
        assert re.search(rf"SmolLM2-135M, {backend}, decode: \d+ us, .* GB/s, \d+% of its peak", text)
        assert re.search(rf"SmolLM2-135M, {backend}, prefill: \d+ us, .* TFLOP/s, \d+% of its peak", text)
    written = json.loads((tmp_path / "nvidia_h100_80gb_hbm3.json").read_text())
    assert written == {
        "device_kinds": [device.device_kind],
        "gpu": dataclasses.asdict(tuning.gpu_tuning(device.device_kind)) | {"decode_warps": 2},
    }


@pytest.mark.skipif(can_compile_for("cuda"), reason="with a compiler it compiles")
def test_gpu_kernels_are_lowered_where_nothing_can_compile_them():
    lines = [line for line, _ in aot.run(["gpt-oss-20b"])]
    assert "cuda, gpt-oss-20b, prefills and decodes: ok" in lines
    assert "cuda, gpt-oss-20b, decodes: ok" in lines


def test_a_wrong_backend_is_noticed(monkeypatch):
    right = xla._add_group
    monkeypatch.setattr(
        xla, "_add_group", lambda state, q, k, v, at, live, scoring: right(state, q, k, v, at + 1, live, scoring)
    )
    problem = Problem(TINY, LENGTHS, "float32", "float32")
    finding = compare("xla", problem, "xla", correctness._step(problem, "reference"))
    assert not finding.good
    assert "WRONG" in str(finding)
    assert finding.kv_equal


@pytest.mark.parametrize(
    ("finding", "text", "good"),
    [
        (Finding("a", 1e-6, 1e-5, True), "a: largest error 1.0e-06 of 1e-05  ok", True),
        (Finding("a", 1e-4, 1e-5, True), "a: largest error 1.0e-04 of 1e-05  WRONG", False),
        (Finding("a", math.nan, 1e-5, True), "WRONG", False),
        (Finding("a", 0.0, 1e-5, False), "writes another KV array  WRONG", False),
        (Finding("a", math.nan, 1e-5, False, refused="no such dtype"), r"refused (no such dtype)", True),
        (Finding("a", math.nan, 1e-5, False, broken="out of memory"), "BROKEN (out of memory)", False),
    ],
)
def test_verdicts(finding, text, good):
    assert text in str(finding)
    assert finding.good == good


def test_a_refusal_says_why():
    problem = Problem(TINY, LENGTHS, "float32", "float32")
    finding = compare("gpu", problem, "gpu", correctness._step(problem, "reference"))
    assert "Only interpret mode is supported on CPU backend" in finding.refused


class TestProblem:
    problem = Problem(TINY, LENGTHS)

    def test_blocks_are_nobody_elses(self):
        ids = np.concatenate(self.problem.blocks)
        assert sorted(ids) == list(range(1, self.problem.num_blocks))

    def test_keys_seen(self):
        assert self.problem.keys == 6 + (1 + 2 + 3) + (21 + 22 + 23 + 24)
        windowed = Problem(dataclasses.replace(TINY, sliding_window=4), LENGTHS)
        assert windowed.keys == 4 + (1 + 2 + 3) + 4 * 4

    def test_step(self):
        step = self.problem.step()
        assert step.positions.tolist() == [5, 0, 1, 2, 20, 21, 22, 23]
        assert step.tiles.kv_end.tolist() == [3, 24]
        assert step.slot_mapping[-1] == self.problem.blocks[2][1] * 16 + 7


class TestSpeed:
    def test_decode(self):
        measured = speed.decode(TINY, "xla", "TPU v5 lite", ((63, 1),) * 2, repeats=2)
        assert measured.amount == 2 * 64 * (2 * 2 * 16 * 2)  # tokens; heads, K and V, head_dim, bytes
        assert measured.peak == PEAKS["TPU v5 lite"].bytes_per_second
        assert measured.seconds > 0

    def test_prefill_on_an_unknown_device(self):
        measured = speed.prefill(TINY, "xla", "cpu", ((0, 8),), repeats=2)
        assert measured.amount == 4 * 4 * 16 * 36
        assert measured.peak is None
        assert "peak" not in str(measured)

    def test_what_is_said(self):
        said = str(speed.Measurement(1e-3, 1e9, "B/s", 4e12))
        assert said == "1000 us, 1000.0 GB/s, 25% of its peak"


class TestTuning:
    def test_search_keeps_what_is_best(self):
        start = tuning.gpu_tuning(None)

        def cost(tried, field):
            if tried.prefill_chunk == 128:
                return math.inf
            return abs(math.log2(tried.decode_chunk / 16)) + abs(math.log2(tried.prefill_warps / 4))

        *_, (_, _, _, best) = tune.search(start, tune.GPU_CANDIDATES, cost)
        assert best == dataclasses.replace(start, decode_chunk=16, prefill_warps=4)

    def test_noise_changes_nothing(self):
        start = tuning.gpu_tuning(None)
        costs = iter(np.linspace(0.0, -0.015, 100))
        *_, (_, _, _, best) = tune.search(start, {"decode_chunk": (16, 32)}, lambda *_: next(costs))
        assert best == start

    def test_sizes_follow_the_chunk(self):
        changed = tune.changed(tuning.tpu_tuning(None), "chunk", 256)
        assert changed.prefill_sizes == changed.decode_sizes == (128, 256)

    def test_what_does_not_compile_costs_the_most(self):
        """Here that is everything: no kernel compiles for a CPU."""
        assert tune.cost(tuning.gpu_tuning(None), "decode_chunk", [TINY], repeats=1) == math.inf

    def test_saved_values_are_found(self, tmp_path):
        (tmp_path / "pair.json").write_text(json.dumps({"device_kinds": ["NVIDIA A1", "NVIDIA A2"], "gpu": {}}))
        (tmp_path / "old.json").write_text(json.dumps({"device_kinds": ["NVIDIA A1"], "gpu": {}}))
        path = tuning.save("NVIDIA A1", "gpu", {"decode_chunk": 16}, tmp_path)
        assert path == tmp_path / "nvidia_a1.json"
        assert json.loads(path.read_text()) == {"device_kinds": ["NVIDIA A1"], "gpu": {"decode_chunk": 16}}
        assert json.loads((tmp_path / "pair.json").read_text())["device_kinds"] == ["NVIDIA A2"]
        assert not (tmp_path / "old.json").exists()


def test_random_kv_is_full():
    for kv_dtype in ("bfloat16", "int8"):
        kv = Problem(TINY, LENGTHS, kv_dtype=kv_dtype).random_kv()
        assert all(bool(jnp.isfinite(leaf.astype(jnp.float32)).all()) for leaf in jax.tree.leaves(kv))
        assert float(jnp.mean(kv.data != 0)) > 0.9

"""The command. See `--help`."""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental.pallas import tpu as pltpu

from jaxcache.kernels import tuning
from jaxcache.kernels.check import aot, correctness, speed, tune
from jaxcache.kernels.dispatch import Gpu, Implementation, Tpu
from jaxcache.kernels.paged_attention.shapes import SHAPES

DTYPES = (
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e5m2"),
    ("bfloat16", "float8_e4m3fn"),
)
CPU_DTYPES = (("float32", "float32"), ("bfloat16", "int8"))
PARTS = ("correctness", "speed", "tune", "aot")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = jax.devices()[0]
    report = Report()
    report.line(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
    accelerator = device.platform in ("tpu", "gpu")
    if not accelerator:
        report.line(
            "No TPU or GPU here: results of XLA and of interpreted kernels on reduced shapes, and whether the "
            "kernels compile. What cannot be checked: results and races on hardware, speed, tile sizes."
        )
    if "correctness" in options.parts:
        check_correctness(report, options.shapes, accelerator, device.platform, device.device_kind)
    if accelerator and "speed" in options.parts:
        measure(report, options.shapes, device.platform, device.device_kind)
    if accelerator and "tune" in options.parts:
        find_tuning(report, device.platform, device.device_kind, options.tuning_folder)
    if not accelerator and "aot" in options.parts:
        report.title("compilation for devices that are not here")
        for line, good in aot.run(options.shapes):
            report.line(line, good)
    report.line(f"{report.wrong} of {report.checks} checks failed" if report.wrong else "all checks passed")
    return 1 if report.wrong else 0


class Report:
    """What is printed, as it comes, with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.checks = self.wrong = 0

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def line(self, text: str, good: bool | None = None) -> None:
        if good is not None:
            self.checks += 1
            self.wrong += not good
        print(f"[{time.perf_counter() - self.start:6.0f} s] {text}", flush=True)


def check_correctness(report: Report, shapes: list[str], accelerator: bool, platform: str, kind: str) -> None:
    """Every backend that runs here, on the real shapes where there is an accelerator."""
    report.title("results against the reference")
    implementations: dict[str, Implementation] = {"xla": "xla"}
    if accelerator:
        implementations[platform] = _on_device(platform, kind)
    else:
        params = pltpu.InterpretParams(uninitialized_memory="nan")
        implementations |= {"gpu, interpreted": Gpu(interpret=True), "tpu, interpreted": Tpu(interpret=params)}
    dtypes = DTYPES if accelerator else CPU_DTYPES
    for finding in correctness.run(shapes, dtypes, implementations, reduce=not accelerator):
        report.line(str(finding), finding.good)


def measure(report: Report, shapes: list[str], platform: str, kind: str) -> None:
    report.title("speed in bf16, blocks of 16: 64 decodes at 4,096 tokens; 4 prefills of 512 behind 2,048")
    for name in shapes:
        for label, implementation in (("xla", "xla"), (platform, _on_device(platform, kind))):
            for part in (speed.decode, speed.prefill):
                try:
                    report.line(f"{name}, {label}, {part.__name__}: {part(SHAPES[name], implementation, kind)}")
                except (jax.errors.JaxRuntimeError, ValueError) as error:
                    report.line(f"{name}, {label}, {part.__name__}: {correctness.first_line(error)}", False)


def find_tuning(report: Report, platform: str, kind: str, folder: Path | None) -> None:
    """Search tile sizes and write them to the file of the device kind."""
    report.title(f"tile sizes for {kind}")
    start = tuning.tpu_tuning(kind) if platform == "tpu" else tuning.gpu_tuning(kind)
    candidates = tune.TPU_CANDIDATES if platform == "tpu" else tune.GPU_CANDIDATES
    shapes, best = tune.shapes(), start
    total = sum(len(values) - 1 for values in candidates.values())

    def cost_of(tried: tune.Tuning, field: str) -> float:
        return tune.cost(tried, field, shapes)

    for done, (field, value, cost, best) in enumerate(tune.search(start, candidates, cost_of), start=1):
        outcome = "does not compile" if math.isinf(cost) else f"{cost:+.3f}"
        report.line(f"{done} of {total}: {field} {value} {outcome}; best so far {getattr(best, field)}")
    path = tuning.save(kind, platform, dataclasses.asdict(best), folder)
    report.line(f"written to {path}" if best != start else f"nothing better than before; written to {path}")


def _on_device(platform: str, kind: str) -> Implementation:
    return Tpu(device_kind=kind) if platform == "tpu" else Gpu(device_kind=kind)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxcache.kernels.check",
        description="Check the kernels on the device that JAX uses here, measure them against the device's peak, "
        "and tune their tile sizes. Without an accelerator: check interpreted kernels, compile for devices that "
        "are not here. Exits with 1 if a check fails.",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to do; default: all")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument(
        "--tuning-folder", type=Path, help="where to write tile sizes; default: the package, which reads them"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

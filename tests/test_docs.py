"""What the README shows is run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.model
@pytest.mark.usefixtures("optimized_programs")
def test_the_readme_example_runs(capsys):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert 20 <= len(code.splitlines()) <= 32
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    cached = [int(n) for n in re.findall(r"^(\d+) of \d+ prompt tokens from the cache: \S", printed, re.MULTILINE)]
    assert cached[0] == 0
    assert min(cached[1:]) >= 16
    assert "'prefix_cache_hits': " in printed


@pytest.mark.parametrize("name", ["own_flax_model", "pool_in_jit"])
def test_the_small_examples_run(name):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if name == "own_flax_model":
        assert re.findall(r"(\d+) tokens cached", done.stdout) == ["0", "48", "48"]
    else:
        assert "8 blocks: served [0, 1, 2, 5, 6] of 7" in done.stdout


@pytest.mark.model
@pytest.mark.slow
def test_the_adapter_example_runs():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "lora.py"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    answers = re.findall(r"^  (.{12}) +(\d+) cached  (.*)$", done.stdout, re.MULTILINE)
    assert [int(cached) for _, cached, _ in answers] == [0, 0, 0, 48, 48, 48, 48, 0, 48]
    assert answers[0][2] == answers[3][2] == answers[6][2]


@pytest.mark.parametrize("name", ["models", "kernels"])
def test_the_links_at_the_top_refuse_their_bare_names(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert f"import jaxcache.{name} instead" in done.stderr

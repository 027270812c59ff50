"""Test settings that must be made before jax first compiles, and the runtime check of array annotations."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

XLA_FLAGS = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4"]
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:  # most of the suite's time is XLA's
    jax.config.update("jax_disable_most_optimizations", True)
    XLA_FLAGS.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true")
os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS).strip()

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")  # a failure is of the change at hand; --hypothesis-profile default explores

PROGRAMS = tempfile.TemporaryDirectory()
"""What this process has compiled, found again by the tests of other files."""
jax.config.update("jax_compilation_cache_dir", PROGRAMS.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

install_import_hook(["jaxcache.kernels", "jaxcache.models", "jaxcache.core.pool"], "beartype.beartype")


MAX_MAPS = 30_000
"""Half of the memory maps that Linux allows a process; each program takes several."""


@pytest.fixture(scope="module", autouse=True)
def unload_programs():
    """Unload what the test files so far have compiled, once that is much."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MAX_MAPS:
        jax.clear_caches()


@pytest.fixture
def optimized_programs():
    """Programs as users have them: for models that take longer to run than to compile, and to look at."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

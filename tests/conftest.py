"""Test settings that must be made before jax is first imported, and the runtime check of array annotations."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4"]
).strip()

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

PROGRAMS = tempfile.TemporaryDirectory()
"""What this process has compiled, found again by the tests of other files: most of their time is XLA's."""
jax.config.update("jax_compilation_cache_dir", PROGRAMS.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

install_import_hook(["jaxcache.kernels", "jaxcache.models", "jaxcache.core.pool"], "beartype.beartype")


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Unload what a test file compiled: each program maps memory, and a process may hold 65,530 maps on Linux."""
    yield
    jax.clear_caches()

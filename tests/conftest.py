"""Test settings that must be made before jax is first imported, and the runtime check of array annotations."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4"]
).strip()

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook(["jaxcache.kernels", "jaxcache.models", "jaxcache.core.pool"], "beartype.beartype")


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Free what a test file compiled: each program maps memory, and a process may hold 65,530 maps on Linux."""
    yield
    jax.clear_caches()

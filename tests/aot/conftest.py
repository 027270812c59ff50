"""Programs compiled for devices that are not here cannot be read back from JAX's compilation cache."""

import importlib.util

import jax

if any(importlib.util.find_spec(name) for name in ("libtpu", "jax_cuda12_plugin")):
    jax.config.update("jax_compilation_cache_dir", None)

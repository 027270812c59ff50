"""Prefix caching for language-model inference in JAX."""

__version__ = "0.1.0"

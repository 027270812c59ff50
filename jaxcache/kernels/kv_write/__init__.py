"""Writing the K and V of new tokens into their slots."""

from jaxcache.kernels.kv_write.api import write_kv

__all__ = ["write_kv"]

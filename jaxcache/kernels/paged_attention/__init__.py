"""Attention of a step's query rows over their sequences' KV blocks."""

from jaxcache.kernels.paged_attention.api import paged_attention, write_and_attend

__all__ = ["paged_attention", "write_and_attend"]

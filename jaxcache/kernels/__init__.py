"""Device side: paged attention and KV writes over one KV array, one folder per operation."""

if __name__ != "jaxcache.kernels":
    raise ImportError(
        f"this folder was imported as {__name__!r}; the link at the top of the checkout is for readers: "
        "import jaxcache.kernels instead"
    )

from jaxcache.kernels.layout import KVCache, KVLayout, init_kv
from jaxcache.kernels.step import PAD_SLOT, StepInputs, Tiles, make_tiles
from jaxcache.kernels.step_check import check_step

__all__ = ["PAD_SLOT", "KVCache", "KVLayout", "StepInputs", "Tiles", "check_step", "init_kv", "make_tiles"]

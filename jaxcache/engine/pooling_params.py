"""What a request may ask instead of an answer: one vector that stands for its prompt."""

from dataclasses import KW_ONLY

from jaxcache.core.request import check_retention
from jaxcache.settings import settings

POOLINGS = ("last", "mean")


@settings
class PoolingParams:
    """How a prompt becomes an embedding. A value that is not allowed is a `ValueError`."""

    _: KW_ONLY
    pooling: str = "last"
    """The hidden state of the last token ("last"), which may start from cached blocks, or the mean over all tokens
    ("mean"), which computes every prompt in full."""
    normalize: bool = True
    """To length 1."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt where that is not needed either."""
    skip_writing_prefix_cache: bool = False
    """Leave nothing of this request for others to find."""
    cache_retention: str = "default"
    """As `SamplingParams` has it."""

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be 'last' or 'mean', got {self.pooling!r}")
        for name in ("normalize", "skip_reading_prefix_cache", "skip_writing_prefix_cache"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        check_retention(self.cache_retention)

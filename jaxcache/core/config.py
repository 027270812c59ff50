"""Frozen settings of cache and scheduler, checked when they are made."""

from jaxcache.core.hashing import get_hash_function
from jaxcache.settings import settings

EVICTION_POLICIES = ("lru", "s3fifo")


def check_eviction_policy(policy: str) -> None:
    """A `ValueError` unless there is such a policy."""
    if policy not in EVICTION_POLICIES:
        raise ValueError(f"eviction_policy must be one of {', '.join(EVICTION_POLICIES)}, got {policy!r}")


@settings
class CacheConfig:
    """What is kept and how it is named. Sizes in tokens or blocks."""

    block_size: int = 16
    """Tokens per block: hits are multiples of it."""
    num_blocks: int | None = None
    """Blocks of the KV array, the null block included; `None` lets the engine choose."""
    kv_cache_dtype: str | None = None
    """Of the KV array, as `kernels.init_kv` takes it; `None` for float32 on CPUs and bfloat16 elsewhere."""
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    """sha256, sha256_cbor, xxhash or xxhash_cbor."""
    hash_seed: str | None = None
    """Fingerprints of two processes agree only where the seed does (`core.hashing.root_hash`)."""
    hash_block_size: int | None = None
    """Tokens per fingerprint, a divisor of every group's block size; `None` for the greatest."""
    eviction_policy: str = "lru"
    """lru (least recently released first) or s3fifo (resists scans: `core.pool_s3fifo`)."""
    shared_prefix_attention: bool = True
    """Whether decodes that begin with the same blocks attend to those together, where that pays: sums are then
    taken in another order, which depends on what runs beside a request."""
    check_steps: bool = False
    """Debug: check every step's block ids and slots before it runs (`kernels.check_step`)."""

    def __post_init__(self) -> None:
        _positive(self, "block_size")
        _positive(self, "num_blocks", minimum=2, optional=True)
        _positive(self, "hash_block_size", optional=True)
        _boolean(self, "enable_prefix_caching", "shared_prefix_attention", "check_steps")
        get_hash_function(self.prefix_caching_hash_algo)
        check_eviction_policy(self.eviction_policy)
        if self.hash_seed is not None and not isinstance(self.hash_seed, str):
            raise ValueError(f"CacheConfig.hash_seed must be a string, got {self.hash_seed!r}")


@settings
class SchedulerConfig:
    """What runs together in one step."""

    max_num_seqs: int = 64
    """Requests that run at a time."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, prefill and decode together."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output; `None` for what the model and the pool allow."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps."""
    long_prefill_token_threshold: int = 0
    """At most so many tokens of one prompt in a step; 0 for no limit."""
    policy: str = "fcfs"
    """fcfs (first come, first served) or priority (lowest priority value first)."""
    watermark: float = 0.0
    """Share of all blocks kept free when a request is admitted beside others, so that those can grow."""
    reserve_full_sequence: bool = True
    """Admit a prompt only when all of it fits, even if it is computed in chunks."""
    decode_steps: int = 1
    """Tokens per request that one device call may generate while nobody waits and nothing else is to do."""

    def __post_init__(self) -> None:
        _positive(self, "max_num_seqs")
        _positive(self, "max_num_batched_tokens")
        _positive(self, "max_model_len", optional=True)
        _positive(self, "long_prefill_token_threshold", minimum=0)
        _positive(self, "decode_steps")
        _boolean(self, "enable_chunked_prefill", "reserve_full_sequence")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ValueError(
                "SchedulerConfig.long_prefill_token_threshold cuts prompts into chunks, and "
                "enable_chunked_prefill is False: leave one of them out"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"SchedulerConfig.policy must be 'fcfs' or 'priority', got {self.policy!r}")
        if not isinstance(self.watermark, int | float) or not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"SchedulerConfig.watermark must lie in [0, 1), got {self.watermark!r}")


def _positive(config: object, field: str, minimum: int = 1, optional: bool = False) -> None:
    value = getattr(config, field)
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(
            f"{type(config).__name__}.{field} must be an integer of at least {minimum}, got {value!r}"
        )


def _boolean(config: object, *fields: str) -> None:
    for field in fields:
        if not isinstance(value := getattr(config, field), bool):
            raise ValueError(f"{type(config).__name__}.{field} must be True or False, got {value!r}")

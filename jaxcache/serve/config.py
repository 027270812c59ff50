"""Frozen settings of the server, checked when they are made."""

from jaxcache.settings import settings


@settings
class ServerConfig:
    """Who may connect, and how much is taken on at a time."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    """Whoever asks must send it as a bearer token; `None` lets everybody in."""
    served_model_name: str | None = None
    """What clients call the model; `None` for the engine's name for it."""
    max_queued_requests: int = 256
    """Answers that may wait or run; one more gets status 429."""
    max_body_bytes: int = 8 << 20
    """A longer request body gets status 413."""
    shutdown_timeout: int = 30
    """Seconds for running requests to finish once the server is told to stop; the rest is aborted."""
    warmup: bool = True
    """Compile everything before the first request."""
    kv_cache_metrics_sample: float = 0.01
    """Share of blocks whose lifetimes are measured, 0 to 1."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queued_requests", 1, 1 << 30),
            ("max_body_bytes", 1, 1 << 40),
            ("shutdown_timeout", 0, 1 << 20),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"ServerConfig.{name} must be an integer from {low} to {high}, got {value!r}")
        if self.api_key is not None and not self.api_key:
            raise ValueError("ServerConfig.api_key must not be empty: give a key, or None for no key")
        if not 0.0 <= self.kv_cache_metrics_sample <= 1.0:
            raise ValueError(
                f"ServerConfig.kv_cache_metrics_sample must lie in [0, 1], got {self.kv_cache_metrics_sample}"
            )

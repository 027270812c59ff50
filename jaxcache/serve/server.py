"""Everything put together: engine thread, metrics, events, HTTP."""

import logging

import uvicorn

from jaxcache.core.events import KVEventsConfig
from jaxcache.engine import Engine
from jaxcache.serve.app import make_app
from jaxcache.serve.config import ServerConfig
from jaxcache.serve.engine_thread import EngineThread
from jaxcache.serve.kv_publisher import KVEventPublisher
from jaxcache.serve.metrics import Metrics

logger = logging.getLogger(__name__)


def make_server(engine: Engine, config: ServerConfig, events: KVEventsConfig | None = None) -> uvicorn.Server:
    """A server that owns `engine` from now on; `run()` serves until it is told to stop.

    When it stops, running requests have `shutdown_timeout` seconds to finish; the rest is aborted.
    """
    publisher = KVEventPublisher(events) if events is not None and events.enable_kv_cache_events else None
    metrics = Metrics(config.served_model_name or engine.name, lambda: thread.snapshot)
    thread = EngineThread(engine, metrics=metrics, publisher=publisher, sample=config.kv_cache_metrics_sample)

    def stop() -> None:
        thread.stop()
        if publisher is not None:
            publisher.close()

    app = make_app(thread, metrics, config, on_stop=stop)
    thread.start()
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level="warning",
            timeout_graceful_shutdown=config.shutdown_timeout,
        )
    )


def serve(engine: Engine, config: ServerConfig, events: KVEventsConfig | None = None) -> None:
    """Serve `engine` until interrupted."""
    if config.warmup:
        engine.warmup()
    logger.info("serving %s on http://%s:%d", config.served_model_name or engine.name, config.host, config.port)
    make_server(engine, config, events).run()

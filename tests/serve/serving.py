"""A server with the mock model, in this process, on a port of the loopback interface."""

import threading
import time
from contextlib import contextmanager

from jaxcache import Buckets, CacheConfig, Engine, SchedulerConfig
from jaxcache.models.tokenizer import ByteTokenizer
from jaxcache.serve.config import ServerConfig
from jaxcache.serve.server import make_server
from tests.engine.mock_model import MockConfig, MockModel

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def text_engine(**options) -> Engine:
    """Answers bytes with bytes; every token depends on all before it."""
    config = MockConfig(vocab_size=257, max_position=2048)
    settings = {
        "cache": CacheConfig(block_size=4, num_blocks=600),
        "scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        "buckets": Buckets.for_limits(64, 8),
        "chat_template": TEMPLATE,
    }
    return Engine(MockModel(config), config, ByteTokenizer(), **settings | options)


def slow_engine(**options) -> Engine:
    """Steps take long enough for a test to do something meanwhile."""
    engine = text_engine(**options)
    run = engine.runner.run

    def slowly(*arguments):
        time.sleep(0.01)
        return run(*arguments)

    engine.runner.run = slowly
    return engine


class Running:
    def __init__(self, server, engine):
        self.engine = engine
        self.server = server
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def settle(self):
        """Wait until nothing runs; all blocks are free then."""
        for _ in range(400):
            pool = self.engine.core.kv.pool
            if not self.engine.has_unfinished and pool.num_free == pool.num_blocks - 1:
                return self.engine.core.kv.check_invariants()
            time.sleep(0.02)
        raise AssertionError(f"{self.engine.core.scheduler.describe()} after 8 seconds")


@contextmanager
def serving(engine=None, events=None, **settings):
    engine = engine or text_engine(events=events)
    config = ServerConfig(port=0, kv_cache_metrics_sample=1.0, **{"shutdown_timeout": 1} | settings)
    server = make_server(engine, config, events)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield Running(server, engine)
    finally:
        server.should_exit = True
        thread.join(config.shutdown_timeout + 30)
        assert not thread.is_alive()

"""KV events over ZeroMQ, in the reference's frames, with a socket that replays what a subscriber missed.

A message is `[topic, sequence number (8 bytes, big-endian, from 0), MessagePack of [time, events, rank]]`. Who
asks for a replay sends the first number wanted, 8 bytes; the answer is one message `[number, payload]` per batch
that is kept, then one of number -1 with an empty payload.

Everything happens in a thread of its own. `publish` never waits: a batch that finds the queue full is dropped, as
is one that cannot be encoded or sent, which shows as a gap in the numbers; a subscriber that is too slow loses
messages, and nobody waits for it.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from jaxcache.core.events import KVCacheEvent, KVEventsConfig, wire

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 50


def encode_batch(timestamp: float, events: Sequence[KVCacheEvent], rank: int | None = 0) -> bytes:
    """MessagePack of one batch. `timestamp`: seconds since 1970; `rank`: among data-parallel engines."""
    return msgspec.msgpack.encode([timestamp, [wire(event) for event in events], rank])


class KVEventPublisher:
    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """Opens its sockets at once; a `ValueError` where an address cannot be used."""
        self._config = config
        self._rank = rank
        self._topic = config.topic.encode()
        self._next = 0
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[int, float, Sequence[KVCacheEvent]]] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay: zmq.Socket | None = None
        try:
            if _binds(config.endpoint):
                self._pub.bind(config.endpoint)
            else:
                self._pub.connect(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"cannot publish KV events on {config.endpoint!r}, replay on {config.replay_endpoint!r}: {error}"
            ) from error
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it sends, with the port that was chosen where the settings leave it open."""
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay else None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxcache-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send `events` as one batch. Returns at once."""
        with self._lock:
            number = self._next
            self._next += 1
        try:
            self._queue.put_nowait((number, time.time(), events))
        except queue.Full:
            logger.warning("KV event batch %d is lost: %d batches wait already", number, self._queue.maxsize)

    def close(self) -> None:
        """Send what waits, then stop."""
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=500)

    def _run(self) -> None:
        while not self._stopping.is_set() or not self._queue.empty():
            self._send(wait=_POLL_MS / 1000)
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)

    def _send(self, wait: float) -> None:
        try:
            number, timestamp, events = self._queue.get(timeout=wait)
        except queue.Empty:
            return
        try:
            payload = encode_batch(timestamp, events, self._rank)
            self._kept.append((number, payload))
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        except Exception:
            logger.exception("KV event batch %d is lost", number)

    def _answer(self, socket: zmq.Socket) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a replay request must be one frame of 8 bytes, got %d frames", len(frames) - 2)
            return
        client, _, start = frames
        first = int.from_bytes(start, "big")
        for number, payload in self._kept:
            if number >= first:
                socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        socket.send_multipart((client, b"", END_OF_REPLAY, b""))


def _binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))

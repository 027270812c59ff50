"""KV events over ZeroMQ against a plain subscriber: a mirror fed by nothing else knows what the engine knows."""

import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import zmq

from jaxcache import CacheConfig
from jaxcache.core.cache_manager import KVCacheManager
from jaxcache.core.events import AllBlocksCleared, KVEventsConfig
from jaxcache.core.hashing import external_block_hash, get_request_block_hasher
from jaxcache.core.request import Request
from jaxcache.core.specs import FullAttentionSpec, KVCacheGroup
from jaxcache.serve.kv_publisher import END_OF_REPLAY, KVEventPublisher, encode_batch
from tests.serve.serving import serving, text_engine


def config(**options):
    addresses = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    return KVEventsConfig(**{"enable_kv_cache_events": True} | addresses | options)


@pytest.fixture
def connect():
    """Makes sockets, and closes them in the end."""
    context, sockets = zmq.Context(), []

    def make(kind, endpoint):
        socket = context.socket(kind)
        sockets.append(socket)
        socket.set_hwm(0)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    yield make
    for made in sockets:
        made.close(linger=0)
    context.term()


def replayed(socket, first):
    """Ask for the batches from number `first` on. A REQ socket would take only the first of the answers."""
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    while True:
        empty, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == END_OF_REPLAY:
            assert payload == b""
            return
        yield int.from_bytes(number, "big"), payload


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Mirror:
    """The set of contents that a subscriber believes in, from messages alone."""

    def __init__(self, socket, replay):
        self.socket, self.replay = socket, replay
        self.keys, self.next, self.num_replayed = set(), 0, 0

    def hear(self, number, payload):
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert timestamp > 1.7e9
        assert rank == 0
        assert number == self.next
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self.keys |= {(key, event["group_idx"]) for key in event["block_hashes"]}
                case "BlockRemoved":
                    self.keys -= {(key, event["group_idx"]) for key in event["block_hashes"]}
                case "AllBlocksCleared":
                    self.keys.clear()
        self.next = number + 1

    def listen(self, skip=()):
        """Take in what is there; numbers in `skip` get lost on the way, and are asked for later."""
        while self.socket.poll(0):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"kv"
            number = int.from_bytes(number, "big")
            if number in skip or number < self.next:
                continue
            if number > self.next:
                self.catch_up()
            if number >= self.next:
                self.hear(number, payload)

    def catch_up(self):
        for number, payload in replayed(self.replay, self.next):
            self.hear(number, payload)
            self.num_replayed += 1


@pytest.mark.parametrize("as_int", [True, False])
def test_a_mirror_knows_the_engines_keys_after_ten_thousand_operations_with_gaps(connect, as_int):
    settings = config(int_block_hashes=as_int, topic="kv", buffer_steps=20_000)
    manager = KVCacheManager([KVCacheGroup(FullAttentionSpec(4))], 60, 200, events=settings)
    publisher = KVEventPublisher(settings)
    replay = connect(zmq.DEALER, publisher.replay_endpoint)
    mirror = Mirror(connect(zmq.SUB, publisher.endpoint), replay)
    rng, hasher, running = np.random.default_rng(0), get_request_block_hasher(4), []
    time.sleep(0.2)

    def keys():
        split = ((key[:-4], int.from_bytes(key[-4:], "big")) for key in list(manager.index.keys()))
        return {(external_block_hash(key) if as_int else key, group) for key, group in split}

    lost = set(rng.integers(0, 10_000, 200).tolist())
    for nth in range(10_000):
        action = rng.integers(1000)
        if action < 500:
            request = Request(str(nth), rng.integers(0, 2, rng.integers(1, 40)), block_hasher=hasher)
            hits, num_hits = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, hits) is not None:
                running.append(request)
        elif action < 995 and running:
            manager.free(running.pop(rng.integers(len(running))))
        elif action >= 995:
            while running:
                manager.free(running.pop())
            assert manager.reset_prefix_cache()
        if events := manager.take_events():
            publisher.publish(events)
        if nth % 500 == 0:
            mirror.listen(lost)
    publisher.publish([])
    expected = keys()
    deadline = time.monotonic() + 20
    while mirror.keys != expected and time.monotonic() < deadline:
        mirror.listen(lost)
        time.sleep(0.01)
        publisher.publish([])
    publisher.close()
    assert mirror.keys == expected
    assert mirror.num_replayed > 50
    assert mirror.next > 2000


def test_a_subscriber_that_comes_late_replays_from_the_start(connect):
    publisher = KVEventPublisher(config(buffer_steps=3))
    for _ in range(5):
        publisher.publish([AllBlocksCleared()])
    replay = connect(zmq.DEALER, publisher.replay_endpoint)
    time.sleep(0.3)
    for first, expected in ((0, [2, 3, 4]), (4, [4]), (9, [])):
        assert [number for number, _ in replayed(replay, first)] == expected
    publisher.close()


def test_a_request_that_is_none_is_ignored_and_the_next_one_answered(connect):
    publisher = KVEventPublisher(config())
    wrong = connect(zmq.DEALER, publisher.replay_endpoint)
    wrong.send_multipart((b"a", b"b", b"c"))
    right = connect(zmq.REQ, publisher.replay_endpoint)
    right.send((0).to_bytes(8, "big"))
    assert right.recv_multipart() == [END_OF_REPLAY, b""]
    assert not wrong.poll(50)
    publisher.close()


def test_publishing_never_waits_for_anybody(connect):
    """A subscriber that never reads, and a queue of one batch: lost batches leave gaps, nothing blocks."""
    publisher = KVEventPublisher(config(hwm=1, max_queue_size=1, buffer_steps=1))
    sleeper = connect(zmq.SUB, publisher.endpoint)
    time.sleep(0.1)
    began = time.perf_counter()
    for _ in range(20_000):
        publisher.publish([AllBlocksCleared()])
    assert time.perf_counter() - began < 10
    publisher.close()
    assert sleeper.poll(0)


def test_a_batch_that_cannot_be_sent_is_a_gap_and_not_the_end(connect, caplog):
    publisher = KVEventPublisher(config())
    socket = connect(zmq.SUB, publisher.endpoint)
    time.sleep(0.2)
    for events in ([AllBlocksCleared()], ["no event"], [AllBlocksCleared()]):
        publisher.publish(events)
    assert [int.from_bytes(socket.recv_multipart()[1], "big") for _ in range(2) if socket.poll(5000)] == [0, 2]
    replay = connect(zmq.DEALER, publisher.replay_endpoint)
    assert [number for number, _ in replayed(replay, 0)] == [0, 2]
    publisher.close()
    assert "KV event batch 1 is lost" in caplog.text


def test_frames_are_the_references(connect):
    publisher = KVEventPublisher(config(topic="kv"))
    socket = connect(zmq.SUB, publisher.endpoint)
    time.sleep(0.2)
    publisher.publish([AllBlocksCleared()])
    assert socket.poll(5000)
    topic, number, payload = socket.recv_multipart()
    publisher.close()
    assert (topic, number) == (b"kv", bytes(8))
    assert payload[0] == 0x93
    assert payload[10:] == bytes.fromhex("9181a474797065b0416c6c426c6f636b73436c656172656400")
    assert encode_batch(1.5, [AllBlocksCleared()], None).hex() == (
        "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c6561726564c0"
    )


def test_the_subscriber_of_the_page_hears_what_is_sent_where_nothing_says_where_to():
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    (program,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "SUB" in code]
    port = str(free_port())
    default = KVEventsConfig().endpoint
    publisher = KVEventPublisher(KVEventsConfig(endpoint=default.replace("5557", port)))
    command = [sys.executable, "-uc", program.replace("5557", port)]
    subscriber = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with subscriber, ThreadPoolExecutor() as reader:
        line = reader.submit(subscriber.stdout.readline)
        deadline = time.monotonic() + 20
        while not line.done() and time.monotonic() < deadline:
            publisher.publish([AllBlocksCleared()])
            time.sleep(0.05)
        subscriber.kill()
    publisher.close()
    assert "['AllBlocksCleared'] 0" in line.result()


def test_an_address_that_cannot_be_used_is_named():
    with pytest.raises(ValueError, match="cannot publish KV events on 'tcp://nowhere'"):
        KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://nowhere"))


def test_a_mirror_of_a_server_knows_what_its_engine_knows(connect):
    """Answers, embeddings, evictions and a reset, heard over the socket of a server that runs."""
    ports = [free_port(), free_port()]
    settings = config(topic="kv", endpoint=f"tcp://*:{ports[0]}", replay_endpoint=f"tcp://127.0.0.1:{ports[1]}")
    engine = text_engine(cache=CacheConfig(block_size=4, num_blocks=40), events=settings)
    with serving(engine, settings) as server:
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        mirror = Mirror(connect(zmq.SUB, addresses[0]), connect(zmq.DEALER, addresses[1]))
        time.sleep(0.2)

        def agree():
            server.settle()
            names = [(key[:-4], int.from_bytes(key[-4:], "big")) for key in list(engine.core.kv.index.keys())]
            expected = {(external_block_hash(name), group) for name, group in names}
            deadline = time.monotonic() + 10
            while mirror.keys != expected and time.monotonic() < deadline:
                mirror.listen()
                time.sleep(0.01)
            assert mirror.keys == expected
            return len(expected)

        for nth in range(8):
            body = {"prompt": f"{nth} asks for something", "max_tokens": 9, "ignore_eos": True}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "x" * 30}, timeout=60).status_code == 200
        assert agree() > 20
        assert engine.stats()["num_evicted_blocks"] > 0
        assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
        assert agree() == 0


def test_nobody_who_waits_for_events_holds_up_a_server(connect, caplog, monkeypatch):
    """A subscriber that never reads, and a publisher that takes a second per batch with room for one to wait."""
    settings = config(hwm=1, max_queue_size=1, buffer_steps=1, endpoint=f"tcp://*:{(port := free_port())}")
    send = KVEventPublisher._send
    monkeypatch.setattr(KVEventPublisher, "_send", lambda self, wait: (time.sleep(1), send(self, wait)))
    with serving(text_engine(events=settings), settings) as server:
        sleeper = connect(zmq.SUB, f"tcp://127.0.0.1:{port}")
        body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        warm = httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": "warm"}, timeout=60)
        began = time.perf_counter()
        for nth in range(10):
            prompt = f"{nth} is a prompt of several blocks"
            answer = httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": prompt}, timeout=60)
            assert answer.status_code == warm.status_code == 200
        seconds = time.perf_counter() - began
        server.settle()
    assert "is lost: 1 batches wait already" in caplog.text
    assert seconds < 8
    assert not sleeper.closed

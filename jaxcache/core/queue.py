"""Requests that wait: in order of arrival, or of priority."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from jaxcache.core.request import Request


class RequestQueue(Protocol):
    def add(self, request: Request) -> None:
        """A new request."""
        ...

    def put_back(self, request: Request) -> None:
        """A request that had been running."""
        ...

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class ArrivalQueue:
    """First come, first served; what had been running goes to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue:
    """Lowest (priority, arrival, id) first."""

    def __init__(self) -> None:
        self._heap: list[Request] = []
        """Those that wait, and some that no longer do."""
        self._waiting: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, request)
        self._waiting[request.request_id] = request

    put_back = add

    def peek(self) -> Request:
        while self._waiting.get(self._heap[0].request_id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0]

    def pop(self) -> Request:
        request = self.peek()
        del self._waiting[request.request_id]
        return heapq.heappop(self._heap)

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting):
            self._heap = sorted(self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._waiting.values()))


def make_queue(policy: str) -> RequestQueue:
    return PriorityQueue() if policy == "priority" else ArrivalQueue()

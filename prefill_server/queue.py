"""Requests that wait to be computed, oldest first and shortest first.

Knows nothing of pages, nor of who may be computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TypeVar

from prefill_server.request import PrefillRequest

Key = TypeVar("Key", bound=tuple[int, ...])


class WaitingQueue:
    """Owner of the two orders. token_count: of all prompts that wait.

    A request that is set aside waits as well, and is in neither order until it is put back: it
    then stands where it stood.
    """

    def __init__(self) -> None:
        self._requests: dict[int, PrefillRequest] = {}
        self._tickets: dict[int, int] = {}
        self._by_age: list[tuple[int, int]] = []
        self._by_length: list[tuple[int, int, int]] = []
        self._next_ticket = 1
        self.token_count = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[PrefillRequest]:
        """All of them, those that are set aside included."""
        return iter(self._requests.values())

    @property
    def oldest(self) -> PrefillRequest | None:
        return self._requests[self._by_age[0][-1]] if self._by_age else None

    @property
    def shortest(self) -> PrefillRequest | None:
        """The older one of two that are equally long."""
        return self._requests[self._by_length[0][-1]] if self._by_length else None

    def add(self, request: PrefillRequest) -> None:
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request
        self._tickets[request.request_id] = self._next_ticket
        self._next_ticket += 1
        self.token_count += len(request.token_ids)
        self.put_back(request)

    def discard(self, request: PrefillRequest) -> None:
        """It waits no longer. Harmless if it did not."""
        if request.request_id in self._requests:
            self.set_aside(request)
            self.token_count -= len(request.token_ids)
            del self._requests[request.request_id]
            del self._tickets[request.request_id]

    def set_aside(self, request: PrefillRequest) -> None:
        """Harmless if it is."""
        age, length = self._keys(request)
        _remove(self._by_age, age)
        _remove(self._by_length, length)

    def put_back(self, request: PrefillRequest) -> None:
        age, length = self._keys(request)
        insort(self._by_age, age)
        insort(self._by_length, length)

    def _keys(self, request: PrefillRequest) -> tuple[tuple[int, int], tuple[int, int, int]]:
        request_id = request.request_id
        ticket = self._tickets[request_id]
        return (ticket, request_id), (len(request.token_ids), ticket, request_id)


def _remove(ordered: list[Key], key: Key) -> None:
    index = bisect_left(ordered, key)
    if index < len(ordered) and ordered[index] == key:
        del ordered[index]

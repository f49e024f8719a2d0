"""The order in which requests wait: those that have begun once before those that have not.

Knows nothing of why a request waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from decode_server.request import DecodeRequest

# So many of a queue are looked at in every round.
FIRST_COUNT = 8


class WaitingQueue:
    """Each of the two kinds in the order in which its requests came to wait."""

    def __init__(self) -> None:
        self._begun: dict[int, DecodeRequest] = {}
        self._new: dict[int, DecodeRequest] = {}
        self._aside: set[int] = set()

    def __len__(self) -> int:
        return len(self._begun) + len(self._new)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._begun or request_id in self._new

    @property
    def ready(self) -> Iterator[DecodeRequest]:
        """Those that wait for nothing that another one computes."""
        return (request for request in self if request.request_id not in self._aside)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return chain(self._begun.values(), self._new.values())

    def add(self, request: DecodeRequest) -> None:
        self._new[request.request_id] = request

    def add_again(self, request: DecodeRequest) -> None:
        """A request comes back that had left the queue."""
        self._begun[request.request_id] = request

    def discard(self, request_id: int) -> None:
        """Harmless if the request does not wait."""
        self._begun.pop(request_id, None)
        self._new.pop(request_id, None)
        self._aside.discard(request_id)

    def set_aside(self, request: DecodeRequest) -> None:
        """It waits as well, for what another one computes, until it is put back."""
        self._aside.add(request.request_id)

    def put_back(self, request: DecodeRequest) -> None:
        self._aside.discard(request.request_id)


class Turns:
    """Who is looked at, of more requests than there is time for: the first ones in every round, the
    others one after the other, from where the round before stopped."""

    def __init__(self) -> None:
        self._next = 0

    def of(self, waiting: list[DecodeRequest]) -> Iterator[DecodeRequest]:
        """To be left once a round has taken long enough."""
        yield from waiting[:FIRST_COUNT]
        others = waiting[FIRST_COUNT:]
        start = self._next if self._next < len(others) else 0
        for self._next in (*range(start, len(others)), *range(start)):
            yield others[self._next]
        self._next = start

"""Requests that wait to be computed: by line, the oldest and the shortest.

Knows nothing of pages, nor of who may be computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from common.scheduling.waiting_queue import WaitingQueue
from prefill_server.request import PrefillRequest

# Of a request: how long its prompt is, when it came, its id.
Length = tuple[int, int, int]


class PromptQueue(WaitingQueue[PrefillRequest]):
    """As the common queue; in each line, which is a client's at one priority, by length as well.

    token_count: of all prompts that wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_length: dict[tuple[int, str], list[Length]] = {}
        self.token_count = 0

    def add(self, request: PrefillRequest) -> None:
        super().add(request)
        self.token_count += len(request.token_ids)

    def discard(self, request: PrefillRequest) -> None:
        if request.request_id in self:
            self.token_count -= len(request.token_ids)
        super().discard(request)

    def set_aside(self, request: PrefillRequest) -> None:
        if request.request_id not in self._aside:
            line, length = self._line_of(request), self._length_of(request)
            lengths = self._by_length[line]
            del lengths[bisect_left(lengths, length)]
            if not lengths:
                del self._by_length[line]
        super().set_aside(request)

    def put_back(self, request: PrefillRequest) -> None:
        if request.request_id in self._aside:
            lengths = self._by_length.setdefault(self._line_of(request), [])
            insort(lengths, self._length_of(request))
        super().put_back(request)

    def shortest_of(self, line: tuple[int, str]) -> PrefillRequest:
        """The older one of two that are equally long."""
        return self._requests[self._by_length[line][0][-1]]

    @staticmethod
    def _line_of(request: PrefillRequest) -> tuple[int, str]:
        return request.claim.priority, request.claim.client

    def _length_of(self, request: PrefillRequest) -> Length:
        _, ticket, request_id = self._keys[request.request_id]
        return len(request.token_ids), ticket, request_id

"""Which requests have run out of time. Knows nothing of what happens to them then."""

from __future__ import annotations

import heapq

# A heap this small is not worth tidying.
TIDY_COUNT_MIN = 64


class Deadlines:
    """A heap of (time, id). A request may have several; all are forgotten with it.

    Entries of forgotten requests stay in the heap until they are more than half of it, so that it
    is bounded by the requests that live and not by how many came within the longest deadline.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._counts: dict[int, int] = {}
        self._live_count = 0

    def __len__(self) -> int:
        """Entries that are held, forgotten ones included."""
        return len(self._heap)

    def add(self, request_id: int, at: float) -> None:
        heapq.heappush(self._heap, (at, request_id))
        self._counts[request_id] = self._counts.get(request_id, 0) + 1
        self._live_count += 1

    def forget(self, request_id: int) -> None:
        """The request has ended. Harmless if it has no deadline."""
        self._live_count -= self._counts.pop(request_id, 0)
        if len(self._heap) > max(TIDY_COUNT_MIN, 2 * self._live_count):
            self._heap = [entry for entry in self._heap if entry[1] in self._counts]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[int]:
        """Requests with a deadline that has passed; each such deadline is reported once."""
        expired: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heapq.heappop(self._heap)
            if request_id in self._counts:
                expired.append(request_id)
                self._live_count -= 1
                self._counts[request_id] -= 1
        return expired

    @property
    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

"""Which requests have run out of time. Knows nothing of what happens to them then."""

from __future__ import annotations

import heapq


class Deadlines:
    """A heap of (time, id); ids that ended meanwhile are skipped when their time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, request_id: int, at: float) -> None:
        heapq.heappush(self._heap, (at, request_id))

    def take_expired(self, now: float) -> list[int]:
        expired: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            expired.append(heapq.heappop(self._heap)[1])
        return expired

    @property
    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

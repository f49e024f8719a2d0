"""How long a newcomer would wait: what waits, by the rate at which requests leave the queue.

Measured only while some wait all the time, for a queue that is empty now and then says nothing of
how fast it could drain. Knows nothing of what they wait for.
"""

from __future__ import annotations

from collections import deque

# The rate is of the last so many seconds.
WINDOW_S = 30.0
# Fewer say nothing: one long prompt may have kept all others waiting.
BEGUN_COUNT_MIN = 8


class DrainRate:
    """Owner of what is known of it."""

    def __init__(self) -> None:
        self._busy_since: float | None = None
        self._begun: deque[float] = deque()

    def note(self, waiting_count: int, now: float) -> None:
        """To be said whenever the queue may have become empty, or is not any more."""
        if not waiting_count:
            self._busy_since = None
            self._begun.clear()
        elif self._busy_since is None:
            self._busy_since = now

    def note_begun(self, now: float) -> None:
        """A request leaves the queue for good: it is computed, or on its way."""
        if self._busy_since is not None:
            self._begun.append(now)

    def wait_s(self, waiting_count: int, now: float) -> float | None:
        """Until as many as wait have begun; None if nothing is known of that."""
        while self._begun and self._begun[0] < now - WINDOW_S:
            self._begun.popleft()
        if self._busy_since is None or len(self._begun) < BEGUN_COUNT_MIN:
            return None
        measured_s = min(WINDOW_S, now - self._busy_since)
        return waiting_count * measured_s / len(self._begun)

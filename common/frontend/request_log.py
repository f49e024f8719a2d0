"""The latest requests that have ended, so many at most: what timelines and the page are made of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.clock import Clock
from common.request import RequestTrace


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """started_wall_s: when it arrived, by this server's wall clock, in seconds since 1970."""

    trace: RequestTrace
    started_wall_s: float

    @property
    def rid(self) -> str:
        return self.trace.origin.rid


class RequestLog:
    """count_max: requests that are kept; the oldest go."""

    def __init__(self, count_max: int, clock: Clock) -> None:
        self._clock = clock
        self._requests: deque[LoggedRequest] = deque(maxlen=count_max)

    def add(self, trace: RequestTrace) -> None:
        ago_s = self._clock.now() - trace.arrived_s
        self._requests.append(LoggedRequest(trace, self._clock.wall() - ago_s))

    def newest(self, count: int | None = None) -> list[LoggedRequest]:
        """Newest first."""
        return list(reversed(self._requests))[:count]

    def find(self, rid: str) -> LoggedRequest | None:
        """The latest request of that name."""
        return next((logged for logged in reversed(self._requests) if logged.rid == rid), None)

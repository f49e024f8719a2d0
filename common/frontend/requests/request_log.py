"""The latest requests that have ended, so many at most: what timelines and the page are made of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from msgspec import structs

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

    def summary(self) -> dict[str, object]:
        """As every list of requests tells of it."""
        trace = self.trace
        return {
            "rid": self.rid,
            "started_at": self.started_wall_s,
            "peer": trace.peer,
            "status": trace.status,
            "message": trace.message,
            "prompt_tokens": trace.prompt_token_count,
            "completion_tokens": trace.output_token_count,
            "cached_tokens": trace.cached.count,
            "cached_tokens_details": structs.asdict(trace.cached),
            "retractions": trace.retraction_count,
            "bytes": trace.transfer.nbytes,
            "ttft_s": trace.ttft_s,
            "e2e_s": trace.e2e_s,
        }


class RequestLog:
    """count_max: requests that are kept; the oldest go."""

    def __init__(self, count_max: int, clock: Clock) -> None:
        self._clock = clock
        self._requests: deque[LoggedRequest] = deque(maxlen=count_max)

    def add(self, trace: RequestTrace) -> LoggedRequest:
        ago_s = self._clock.now() - trace.arrived_s
        logged = LoggedRequest(trace, self._clock.wall() - ago_s)
        self._requests.append(logged)
        return logged

    def newest(self) -> list[LoggedRequest]:
        """Newest first."""
        return list(reversed(self._requests))

    def find(self, rid: str) -> LoggedRequest | None:
        """The latest request of that name."""
        return next((logged for logged in reversed(self._requests) if logged.rid == rid), None)

"""The one door to time. Everything else is given `now`, or a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from: the system in production, a test or a simulation elsewhere."""

    def now(self) -> float:
        """Seconds that only grow, from an arbitrary start. Comparable within one machine only."""

    def wall(self) -> float:
        """Seconds since 1970, for timestamps. May jump; never measure with it."""


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


def thread_cpu_clock(thread_ident: int) -> int:
    """The clock of what a thread of this process has computed, for `thread_cpu_s`."""
    return time.pthread_getcpuclockid(thread_ident)


def thread_cpu_s(clock_id: int) -> float:
    """Seconds that a thread has computed. It may be read from any thread while that one lives."""
    return time.clock_gettime(clock_id)


class ManualClock:
    """Stands still until it is moved: for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time does not run backwards: {seconds}"
        self._now += seconds

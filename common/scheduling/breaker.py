"""Whether a peer that failed lately is asked again: a circuit breaker with half-open probes.

    closed --FAILURE_COUNT_MAX in a row--> open --its interval--> half open --success--> closed
                                            ^                        |
                                            +----- failure, longer --+

Knows nothing of peers or requests. Time and randomness are passed in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

# Failures in a row. A prefill server counts its transfers to one peer by the same number.
FAILURE_COUNT_MAX = 3
# An open breaker waits this long, twice as long after every probe that failed, up to the maximum.
OPEN_S = 1.0
OPEN_S_MAX = 30.0
# A probe that is never answered, because its client went away, is replaced by another one.
PROBE_S = 10.0


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(slots=True)
class Breaker:
    """failure_count: in a row. open_count: how often it opened, since start."""

    rng: random.Random
    state: BreakerState = BreakerState.CLOSED
    failure_count: int = 0
    open_count: int = 0
    _open_s: float = OPEN_S
    _until: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether the peer may be asked: always, or once as a probe."""
        return self.state is BreakerState.CLOSED or now >= self._until

    def note_asked(self, now: float) -> None:
        """The peer was asked; of an open breaker, this is the probe."""
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.HALF_OPEN
            self._until = now + PROBE_S

    def note_success(self) -> None:
        self.state = BreakerState.CLOSED
        self.failure_count = 0
        self._open_s = OPEN_S

    def note_failure(self, now: float) -> None:
        """Answers to what was asked before it opened count for nothing more."""
        self.failure_count += 1
        if self.state is BreakerState.OPEN or (
            self.state is BreakerState.CLOSED and self.failure_count < FAILURE_COUNT_MAX
        ):
            return
        if self.state is BreakerState.HALF_OPEN:
            self._open_s = min(OPEN_S_MAX, 2 * self._open_s)
        self.state = BreakerState.OPEN
        self.open_count += 1
        # Decode servers that saw the same failure do not all come back at the same moment.
        self._until = now + self._open_s * self.rng.uniform(0.5, 1.0)

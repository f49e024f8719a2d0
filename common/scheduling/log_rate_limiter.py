"""Log lines that a peer or a client can cause at will: a few at once, then one a second.

A few servers that are wrongly set up and start together each have their line; a flood has a count.
Knows nothing of logs. Time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL_S = 1.0
# Lines that may follow each other at once. Each comes back after INTERVAL_S.
BURST = 8


@dataclass(slots=True)
class LogRateLimiter:
    """One kind of line."""

    # When as many lines as BURST may be written again.
    _full_at: float = 0.0
    _kept_back_count: int = 0

    def admit(self, text: str, now: float) -> str:
        """The line to write, "" if it is kept back."""
        full_at = max(self._full_at, now) + INTERVAL_S
        if full_at - now > BURST * INTERVAL_S:
            self._kept_back_count += 1
            return ""
        count, self._kept_back_count = self._kept_back_count, 0
        self._full_at = full_at
        return f"{text} (and {count} more of this kind)" if count else text

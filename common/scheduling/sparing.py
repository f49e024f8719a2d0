"""Lines that somebody else can cause as often as they like: one a second, with a count of the rest.

Knows nothing of logs. Time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL_S = 1.0


@dataclass(slots=True)
class Sparing:
    """One kind of line."""

    _next_at: float = 0.0
    _kept_back_count: int = 0

    def admit(self, text: str, now: float) -> str:
        """The line to write, "" if it is kept back."""
        if now < self._next_at:
            self._kept_back_count += 1
            return ""
        count, self._kept_back_count = self._kept_back_count, 0
        self._next_at = now + INTERVAL_S
        return f"{text} (and {count} more of this kind)" if count else text

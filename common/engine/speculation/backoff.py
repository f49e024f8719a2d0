"""How many tokens are worth proposing for a sequence, by what became of the last ones.

A row that is verified in vain costs its share of a pass, on a CPU almost that of another sequence.
After a success twice as many are proposed as were accepted, and one more; after a failure one; and
where that fails again and again, none for some steps. What the text does next is not
known, so no pause is long.
"""

from __future__ import annotations

PAUSE_MAX = 8
"""Steps. With one token in each ninth step, proposals that are never right cost a few percent."""


class Backoff:
    """Of one sequence, step by step: `limit` before, `note` after it."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._failure_count = 0
        self._pause = 0

    def limit(self, count: int) -> int:
        """How many of so many to propose now."""
        if self._pause:
            self._pause -= 1
            return 0
        return count if self._limit is None else min(count, self._limit)

    def note(self, proposed_count: int, accepted_count: int) -> None:
        """What became of the proposals of a step; of none, nothing is learned."""
        if not proposed_count:
            return
        self._limit = 2 * accepted_count + 1
        self._failure_count = 0 if accepted_count else self._failure_count + 1
        if self._failure_count > 1:
            self._pause = min(2 ** (self._failure_count - 2), PAUSE_MAX)

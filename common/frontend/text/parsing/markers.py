"""Fixed strings looked for in text that comes in pieces: the first, and of those the longest.

What is found does not depend on where pieces end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class Markers:
    """A set of strings to look for; none may be empty."""

    def __init__(self, markers: Iterable[str]) -> None:
        longest_first = sorted(set(markers), key=lambda marker: (-len(marker), marker))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(
            marker[:length] for marker in longest_first for length in range(1, len(marker))
        )
        first = "|".join(sorted(re.escape(marker[0]) for marker in set(longest_first)))
        self._first = re.compile(first or r"(?!)")
        self._held_max = max((len(marker) for marker in longest_first), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._beginnings)

    def find(self, text: str, start: int, *, is_last: bool) -> tuple[int, str]:
        """Where in `text`, from `start` on, a marker stands, and which; "" if none does.

        Then the place is where it may turn out to stand, once there is more text, or the end.
        """
        held = len(text) if is_last else self._held_from(text, start)
        found = self._pattern.search(text, start)
        if found is None or found.start() >= held:  # a longer one may stand there
            return held, ""
        return found.start(), found[0]

    def _held_from(self, text: str, start: int) -> int:
        """Where what may be the beginning of a marker reaches the end of `text`."""
        place = max(start, len(text) - self._held_max)
        while (first := self._first.search(text, place)) is not None:
            if text[first.start() :] in self._beginnings:
                return first.start()
            place = first.end()
        return len(text)

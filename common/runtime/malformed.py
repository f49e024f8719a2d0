"""Counts of malformed messages by link, in bounded memory."""

from __future__ import annotations

# Links whose malformed messages are counted. A flood of new links displaces the oldest.
COUNTED_LINKS_MAX = 1024


class MalformedCounts:
    """Counts of the COUNTED_LINKS_MAX links that sent a malformed message last."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, link: str) -> int:
        count = self._counts.pop(link, 0) + 1
        self._counts[link] = count
        if len(self._counts) > COUNTED_LINKS_MAX:
            del self._counts[next(iter(self._counts))]
        return count

    def forget(self, link: str) -> None:
        self._counts.pop(link, None)

"""How many messages of each link could not be read. Bounded, whoever sends them."""

from __future__ import annotations

# Links whose malformed messages are counted; those of a flood of new links push each other out.
COUNTED_LINKS_MAX = 1024


class MalformedCounts:
    """Malformed messages of each link, of the links that sent one last."""

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

"""Which weights made which tokens of an answer: runs of tokens by the version of their weights.

Knows nothing of where tokens come from.
"""

from __future__ import annotations


class WeightSpans:
    """Grows with an output. Two updates under one name look like one version: names are the
    operator's."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, int]] = []

    def add(self, version: str, count: int) -> None:
        """The next `count` tokens were made by these weights."""
        if not count:
            return
        if self._spans and self._spans[-1][0] == version:
            count += self._spans.pop()[1]
        self._spans.append((version, count))

    def of_first(self, count: int) -> list[tuple[str, int]]:
        """(version, tokens) of the first `count` tokens, in their order; fewer if fewer have been
        added."""
        spans: list[tuple[str, int]] = []
        for version, length in self._spans:
            taken = min(length, count)
            if taken:
                spans.append((version, taken))
            count -= taken
        return spans

"""Stop strings found in text that comes in pieces. The cut does not depend on where pieces end.

The match that is complete first wins; of those that complete with the same character, the longest.
Text that may still turn out to be part of a match is held back. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text. matched: the stop string that ended it, None so far.

    Costs one step per character and stop string (Knuth-Morris-Pratt), whatever their lengths.
    """

    def __init__(self, stops: Sequence[str], *, keeps_match: bool = False) -> None:
        assert all(stops), "an empty stop string matches before the first character"
        self.matched: str | None = None
        self._keeps_match = keeps_match
        self._stops = tuple(stops)
        self._borders = [borders(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # of the prefix of each that the text ends with
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is safe to show. Nothing may be pushed after a match."""
        assert self.matched is None, "the text has ended"
        if not self._stops:
            return piece
        text = self._held + piece
        for place in range(len(self._held), len(text)):
            found = self._step(text[place])
            if found:
                self.matched = found
                self._held = ""
                end = place + 1
                return text[:end] if self._keeps_match else text[: end - len(found)]
        shown_length = len(text) - max(self._lengths)
        self._held = text[shown_length:]
        return text[:shown_length]

    def flush(self) -> str:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        """Advance every prefix by one character; the longest stop string it completes, or ""."""
        found = ""
        for index, stop in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != character:
                length = self._borders[index][length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                if length > len(found):
                    found = stop
                length = self._borders[index][length - 1]
            self._lengths[index] = length
        return found


def borders(word: str) -> list[int]:
    """For each prefix of `word`, the length of its longest proper prefix that is also its end."""
    lengths = [0] * len(word)
    length = 0
    for place in range(1, len(word)):
        while length and word[place] != word[length]:
            length = lengths[length - 1]
        if word[place] == word[length]:
            length += 1
        lengths[place] = length
    return lengths

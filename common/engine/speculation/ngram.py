"""Proposals from a sequence's own tokens (prompt lookup): what followed its latest ones before.

    tokens   a b c d e | x y | a b c          the latest `a b c` stood at the beginning
    proposed                        d e x y

Where that fails, less is proposed, and less often (`backoff.py`). Needs no weights.
Source: github.com/apoorvumang/prompt-lookup-decoding; vLLM's method `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.engine.speculation.backoff import Backoff
from common.engine.speculation.proposer import Drawn

MATCH_MIN = 2
"""Latest tokens that have to have stood before. A single one mostly is followed by another token,
and what is proposed in vain costs its share of a pass."""

MATCH_MAX = 8
"""Longer matches are not told apart."""


class NgramProposer:
    """See `Proposer`."""

    name = "NGRAM"
    tapped: tuple[int, ...] = ()
    layer_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}

    def add(self, slot: int, token_ids: NDArray[np.int64]) -> None:
        assert slot not in self._sequences, slot
        self._sequences[slot] = _Sequence(token_ids)

    def remove(self, slot: int) -> None:
        del self._sequences[slot]

    def note(self, drawn: Drawn) -> None:
        for slot, tokens in zip(drawn.slots, drawn.tokens, strict=True):
            self._sequences[slot].extend(tokens)

    def propose(self, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        pairs = zip(slots, counts, strict=True)
        return [self._sequences[slot].propose(count) for slot, count in pairs]


class _Sequence:
    """A growing int32[n], and what was proposed behind it."""

    def __init__(self, token_ids: NDArray[np.int64]) -> None:
        self._count = len(token_ids)
        self._memory = token_ids.astype(np.int32)
        self._backoff = Backoff()
        self._proposed_count = 0

    def propose(self, count: int) -> list[int]:
        proposed = find_continuation(self._memory[: self._count], self._backoff.limit(count))
        self._proposed_count = len(proposed)
        return proposed

    def extend(self, tokens: Sequence[int]) -> None:
        self._backoff.note(self._proposed_count, max(0, len(tokens) - 1))
        self._proposed_count = 0
        count = self._count + len(tokens)
        if count > len(self._memory):
            self._memory = np.concatenate((self._memory, np.zeros(count, dtype=np.int32)))
        self._memory[self._count : count] = tokens
        self._count = count


def find_continuation(tokens: NDArray[np.int32], count: int) -> list[int]:
    """At most `count` tokens that followed the latest ones where these stood before; none if no
    MATCH_MIN of them did.

    Of all places the one is taken where most of the latest tokens stood, MATCH_MAX counting as
    most; of equals the last one that `count` tokens follow, or else the first one.
    """
    if count == 0 or len(tokens) <= MATCH_MIN:
        return []
    # ends[i]: a token that is equal to the last one, and has one behind it.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    matched = 1
    while matched < MATCH_MAX and len(ends):
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[-1 - matched]]
        if len(longer) == 0:
            break
        ends, matched = longer, matched + 1
    if matched < MATCH_MIN or len(ends) == 0:
        return []
    followed = ends[ends + count < len(tokens)]
    end = int(followed[-1] if len(followed) else ends[0])
    proposed: list[int] = tokens[end + 1 : end + 1 + count].tolist()
    return proposed

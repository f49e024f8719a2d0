"""A proposer that knows the right tokens, and errs as often as it is told to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.engine.speculation.proposer import Drawn


class GuidedProposer:
    """See `Proposer`. texts: prompt and output of every sequence that comes; none begins another.
    right: the chance of each proposal to be the right token."""

    name = "guided"
    tapped: tuple[int, ...] = ()
    layer_ids: tuple[int, ...] = ()

    def __init__(self, texts: list[list[int]], right: float, vocab_size: int) -> None:
        self._texts = texts
        self._right = right
        self._vocab_size = vocab_size
        self._of_slot: dict[int, tuple[list[int], int]] = {}

    def add(self, slot: int, token_ids: NDArray[np.int64]) -> None:
        tokens = token_ids.tolist()
        found = [text for text in self._texts if text[: len(tokens)] == tokens]
        assert found, f"nobody knows what follows {tokens}"
        self._of_slot[slot] = (found[0], len(tokens))

    def remove(self, slot: int) -> None:
        del self._of_slot[slot]

    def note(self, drawn: Drawn) -> None:
        for slot, tokens in zip(drawn.slots, drawn.tokens, strict=True):
            text, count = self._of_slot[slot]
            self._of_slot[slot] = (text, count + len(tokens))

    def propose(self, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        return [self._guess(slot, count) for slot, count in zip(slots, counts, strict=True)]

    def _guess(self, slot: int, count: int) -> list[int]:
        text, known = self._of_slot[slot]
        # All ranks have to guess the same.
        rng = random.Random(f"{text[0]} {known}")
        proposed: list[int] = []
        for token in text[known : known + count]:
            wrong = (token + 1 + rng.randrange(self._vocab_size - 1)) % self._vocab_size
            proposed.append(token if rng.random() < self._right else wrong)
        return proposed

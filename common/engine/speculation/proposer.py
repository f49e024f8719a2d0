"""Proposers of tokens ahead of sequences, and what they are given of each sequence.

A proposal is a guess: the pass that reads it draws the token that belongs there in any case. Knows
nothing of how proposals are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FollowedRows:
    """Consecutive rows of one sequence in a pass, and the tokens behind them.

    slot: of the sequence. first_row: in the pass. start: position of that row. next_tokens: of each
    row, the token behind it. Behind the last row of a prompt that is what its first sample drew;
    rows of a prompt of which nothing was drawn end before that.
    """

    slot: int
    first_row: int
    start: int
    next_tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one step drew, in the order of its rows: sequences whose prompt it completed, then those
    that decoded.

    slots: of the `SequenceTable`, distinct; from `decode_start` on those that decoded.
    tokens: of each, what was drawn, one or more; none of a sequence that failed.
    first_rows: the row of the pass behind which the first of `tokens` was drawn, the others behind
    the next rows. prompts: rows of chunks, whose next tokens are known. tapped: of every row of the
    pass, the hidden states that the proposer asks for (`tapped`), side by side; None if it asks for
    none.
    """

    slots: Sequence[int]
    tokens: Sequence[Sequence[int]]
    first_rows: Sequence[int]
    decode_start: int = 0
    prompts: Sequence[FollowedRows] = ()
    tapped: Tensor | None = None


class Proposer(Protocol):
    """One writer: the thread that runs the model. All ranks of a server propose the same.

    tapped: layers whose inputs are to be in `Drawn.tapped`, as `DraftConfig` names them.
    layer_ids: of the layers of its own, whose cache is complete when `note` returns.
    """

    name: str
    tapped: tuple[int, ...]
    layer_ids: tuple[int, ...]

    def add(self, slot: int, token_ids: NDArray[np.int64]) -> None:
        """A sequence begins with int64[n] tokens, prompt and output so far."""
        ...

    def remove(self, slot: int) -> None:
        """A sequence that was added has ended."""
        ...

    def note(self, drawn: Drawn) -> None:
        """A step has drawn tokens, which follow those that are known."""
        ...

    def propose(self, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """At the beginning of a step that decodes these sequences: for each the tokens that may
        follow, at most `counts` of them, perhaps none."""
        ...

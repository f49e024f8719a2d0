"""What proposes tokens ahead of sequences, and what it is told of them.

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

from common.engine.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one step drew, in the order of its rows: sequences whose prompt it completed, then those
    that decoded.

    slots: of the `SequenceTable`, distinct. tokens: of each, what was drawn, one or more; none of a
    sequence that failed. batch, hidden: the pass, and what its last layer made of every token of
    it, [T, hidden]; None unless the proposer asks for them (`needs_hidden`). first_rows: the row of
    T behind which the first of `tokens` was drawn, the others behind the next rows.
    """

    slots: Sequence[int]
    tokens: Sequence[Sequence[int]]
    first_rows: Sequence[int]
    batch: ForwardBatch | None = None
    hidden: Tensor | None = None


class Proposer(Protocol):
    """One writer: the thread that runs the model. All ranks of a server propose the same.

    needs_hidden: whether `Drawn.batch` and `Drawn.hidden` are to be there.
    """

    name: str
    needs_hidden: bool

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

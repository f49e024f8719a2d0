"""Sequences that decode, with their proposals, as rows of one pass.

    sequence    a       a       a       b       c       c
    token       latest  guess   guess   latest  latest  guess
    tokens      7       8       9       4       5       6           cached after the row
    depth       0       1       2       0       0       1

Every row is one new token of a sequence that is one token longer than the row before says. So
layers compute a row as they compute a token that is decoded, by the same kernels and recordings:
all rows of a layer are in the cache before any is read. Only what is carried from token to token
outside of pages of tokens needs to know that a row goes on from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DecodeRows:
    """slots: int64[B], distinct. proposals: of each."""

    slots: Ints
    proposals: Sequence[Sequence[int]]

    @cached_property
    def counts(self) -> Ints:
        """int64[B], proposals of each."""
        return np.array([len(tokens) for tokens in self.proposals], dtype=np.int64)

    @cached_property
    def has_proposals(self) -> bool:
        return any(self.proposals)

    @cached_property
    def first_rows(self) -> Ints:
        """int64[B], the row of each latest token."""
        ends = (self.counts + 1).cumsum()
        return ends - self.counts - 1

    @cached_property
    def row_slots(self) -> Ints:
        """int64[rows]."""
        return np.repeat(self.slots, self.counts + 1)

    @cached_property
    def depths(self) -> Ints:
        """int64[rows], of the proposal; 0 of a latest token."""
        return np.arange(len(self.row_slots)) - np.repeat(self.first_rows, self.counts + 1)

    @cached_property
    def tokens(self) -> Ints:
        """int64[rows], the proposals; 0 where a latest token is."""
        return np.array([t for tokens in self.proposals for t in (0, *tokens)], dtype=np.int64)

    @cached_property
    def continued(self) -> list[int]:
        """Rows that the next row goes on from."""
        return np.flatnonzero(self.depths[1:]).tolist() if self.has_proposals else []

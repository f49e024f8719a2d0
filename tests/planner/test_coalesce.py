"""Joining neighbours, against joining them one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.planner.coalesce import coalesce, sort_by_target

Copy = tuple[int, int, int]


def join_slowly(copies: list[Copy]) -> list[Copy]:
    joined: list[Copy] = []
    for source, target, nbytes in sorted(copies, key=lambda copy: copy[1]):
        if joined:
            last_source, last_target, last_nbytes = joined[-1]
            if (last_source + last_nbytes, last_target + last_nbytes) == (source, target):
                joined[-1] = (last_source, last_target, last_nbytes + nbytes)
                continue
        joined.append((source, target, nbytes))
    return joined


@st.composite
def disjoint_copies(draw: st.DrawFn) -> list[Copy]:
    """Copies that often, but not always, go on where another one ends; in any order."""
    copies: list[Copy] = []
    source = target = 0
    for _ in range(draw(st.integers(0, 30))):
        source += draw(st.sampled_from([0, 0, 0, 3]))
        target += draw(st.sampled_from([0, 0, 0, 5]))
        nbytes = draw(st.integers(1, 4))
        copies.append((source, target, nbytes))
        source, target = source + nbytes, target + nbytes
    return draw(st.permutations(copies))


@settings(deadline=None, derandomize=True, database=None)
@given(disjoint_copies())
def test_neighbours_are_joined_and_nothing_else(copies: list[Copy]) -> None:
    columns = np.array(copies, dtype=np.int64).reshape(-1, 3).T
    joined = coalesce(*sort_by_target(columns[0], columns[1], columns[2]))

    assert list(zip(*(column.tolist() for column in joined), strict=True)) == join_slowly(copies)
    assert all(column.dtype == np.int64 for column in joined)

"""Joins copies that are neighbours on both sides. Knows offsets and sizes only."""

from __future__ import annotations

import numpy as np

from common.planner.copy_plan import Int64Array


def sort_by_target(
    source_offset: Int64Array, target_offset: Int64Array, nbytes: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The same copies, ascending in `target_offset`. All int64[run]."""
    if bool((target_offset[1:] >= target_offset[:-1]).all()):
        return source_offset, target_offset, nbytes
    # Stable: it is fast on what it gets here, a few stretches that are sorted already.
    order = np.argsort(target_offset, kind="stable")
    return source_offset[order], target_offset[order], nbytes[order]


def coalesce(
    source_offset: Int64Array, target_offset: Int64Array, nbytes: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Join every copy to its predecessor if it goes on where that ends, on both sides.

    Args: int64[run], sorted by target offset, all between the same two regions.
    """
    is_new = np.ones(len(nbytes), dtype=np.bool_)
    np.logical_or(
        source_offset[1:] != source_offset[:-1] + nbytes[:-1],
        target_offset[1:] != target_offset[:-1] + nbytes[:-1],
        out=is_new[1:],
    )
    if bool(is_new.all()):
        return source_offset, target_offset, nbytes
    first = np.flatnonzero(is_new)
    return source_offset[first], target_offset[first], np.add.reduceat(nbytes, first)

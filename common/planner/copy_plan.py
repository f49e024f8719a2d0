"""The byte ranges of one transfer between two ranks, as arrays.

Knows nothing of pages, layers or families.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """`run_count` copies of `nbytes[i]` bytes: (source region, offset) -> (target region, offset).

    A region is an index into the list of memory regions that a rank announced at the handshake;
    offsets are in bytes from the start of that region. All five arrays are int64[run].
    """

    source_region: Int64Array
    source_offset: Int64Array
    target_region: Int64Array
    target_offset: Int64Array
    nbytes: Int64Array

    @property
    def run_count(self) -> int:
        return len(self.nbytes)

    @property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())

    @staticmethod
    def empty() -> CopyPlan:
        zero = np.zeros(0, dtype=np.int64)
        return CopyPlan(zero, zero, zero, zero, zero)

    @staticmethod
    def concatenate(plans: list[CopyPlan]) -> CopyPlan:
        if not plans:
            return CopyPlan.empty()
        return CopyPlan(
            np.concatenate([plan.source_region for plan in plans]),
            np.concatenate([plan.source_offset for plan in plans]),
            np.concatenate([plan.target_region for plan in plans]),
            np.concatenate([plan.target_offset for plan in plans]),
            np.concatenate([plan.nbytes for plan in plans]),
        )

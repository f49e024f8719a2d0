"""The cost of gathering and of scattering a piece on a rank's device, measured at start.

The trial makes the copies of real pieces, from the index lists to the wait for the device. Source
and target have devices of the same kind, so the source measures scattering for the target as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from common.clock import Clock
from common.planner.link_cost import CopyCost, CopyCosts, measured_copy
from common.planner.staging import Conversion, LinearCopy
from common.transport.copies import copy_runs
from common.worker.staging.copier import Copier

RUN_NBYTES = 4096
"""Size of the runs of a trial. Pieces with much longer runs are not staged."""

REPEATS = 5
"""The quickest counts. The first one also touches memory and loads kernels."""

UNCHANGED = Conversion("bfloat16", "bfloat16", "bfloat16")

_Copy = Callable[[LinearCopy, Conversion, Tensor], None]


def measure_copies(region: Tensor, slot_nbytes: int, clock: Clock) -> CopyCosts:
    """region: uint8, warm and free to be overwritten; its end stands for a pool's pages.

    slot_nbytes: of a full piece; at most half of the region.
    """
    slot, pages = region[:slot_nbytes], region[slot_nbytes:]
    copier = Copier([pages], copy_runs)
    return CopyCosts(
        gather=_measure(copier.gather, slot, len(pages), clock),
        scatter=_measure(copier.scatter, slot, len(pages), clock),
    )


def _measure(copy: _Copy, slot: Tensor, pages_nbytes: int, clock: Clock) -> CopyCost:
    run_count = len(slot) // RUN_NBYTES
    least_s, full_s = (
        _quickest(copy, _scattered(count, pages_nbytes), slot, clock) for count in (1, run_count)
    )
    return measured_copy(least_s=least_s, nbytes=(run_count - 1) * RUN_NBYTES, full_s=full_s)


def _quickest(copy: _Copy, runs: LinearCopy, slot: Tensor, clock: Clock) -> float:
    seconds: list[float] = []
    for _ in range(REPEATS):
        started_at = clock.now()
        copy(runs, UNCHANGED, slot)
        seconds.append(clock.now() - started_at)
    return min(seconds)


def _scattered(count: int, pages_nbytes: int) -> LinearCopy:
    """`count` runs of the pages, in random order."""
    places = np.random.default_rng(0).permutation(pages_nbytes // RUN_NBYTES)[:count]
    return LinearCopy(
        region=0,
        page_offset=places.astype(np.int64) * RUN_NBYTES,
        linear_offset=np.arange(count, dtype=np.int64) * RUN_NBYTES,
        nbytes=np.full(count, RUN_NBYTES, dtype=np.int64),
    )

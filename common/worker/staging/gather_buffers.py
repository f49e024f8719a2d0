"""Buffers in which a prefill rank gathers pieces, and the put of each piece.

Owned by the I/O thread. Knows nothing of messages.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from common.planner.copy_plan import CopyPlan
from common.planner.staging import LinearCopy, StagedPiece
from common.worker.staging.copier import Copier
from common.worker.staging.staged_transfer import SentPiece, StagedTransfer


class GatherBuffers:
    """Owner of the buffers and of their content.

    region_index: number of their memory among the transport's. nbytes: of one buffer.
    """

    def __init__(self, region: Tensor, region_index: int, nbytes: int, copier: Copier) -> None:
        """region: uint8[a multiple of nbytes]."""
        self.region_index = region_index
        self.nbytes = nbytes
        self._region = region
        self._copier = copier
        self._count = len(region) // nbytes
        self._free = list(range(self._count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def has_room(self, taken_count: int, lane_count: int) -> bool:
        """Whether a lane that has taken `taken_count` buffers may take one more.

        Each lane has a share, so a stalled lane leaves buffers to the others.
        """
        return bool(self._free) and taken_count < max(1, self._count // max(1, lane_count))

    def take(self) -> int:
        return self._free.pop()

    def put_back(self, buffer: int | None) -> None:
        """buffer: None if the piece was not gathered."""
        if buffer is not None:
            self._free.append(buffer)

    def gather(self, sent: SentPiece) -> CopyPlan:
        """Gather a piece into its buffer, if it has one; returns the put that fills its slot."""
        transfer, piece = sent.transfer, sent.piece
        copy = transfer.pair.gather(piece, transfer.source_pages)
        slot_start = sent.slot * transfer.lane.slot_nbytes
        if sent.buffer is None:
            return _gathering_put(copy, transfer.lane.region, slot_start)
        start = sent.buffer * self.nbytes
        target = self._region[start : start + self.nbytes]
        self._copier.gather(copy, transfer.pair.conversion(piece), target)
        nbytes = transfer.pair.wire_nbytes(piece)
        return _one_put(self.region_index, start, transfer.lane.region, slot_start, nbytes)


def is_gathered_first(transfer: StagedTransfer, piece: StagedPiece) -> bool:
    """Whether a piece needs a buffer. Over shared memory the put itself gathers, unless element
    types differ."""
    conversion = transfer.pair.conversion(piece)
    return not transfer.lane.is_mapped or conversion.source != conversion.wire


def _one_put(
    source_region: int, source_offset: int, target_region: int, target_offset: int, nbytes: int
) -> CopyPlan:
    columns = (source_region, source_offset, target_region, target_offset, nbytes)
    return CopyPlan(*(np.array([column], dtype=np.int64) for column in columns))


def _gathering_put(copy: LinearCopy, region: int, slot_start: int) -> CopyPlan:
    """Straight from the pages."""
    count = len(copy.nbytes)
    return CopyPlan(
        np.full(count, copy.region, dtype=np.int64),
        copy.page_offset,
        np.full(count, region, dtype=np.int64),
        copy.linear_offset + slot_start,
        copy.nbytes,
    )

"""Lanes of a prefill rank: for each target rank, its ring of slots and its control link.

Before a lane is used, its address is dialled, round trips are timed, and the transport connection
is measured on one of the lane's own slots. Knows nothing of pieces.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from common.planner.copy_plan import CopyPlan, Int64Array
from common.planner.link_cost import CopyCosts, LinkCost, measured_cost
from common.protocol.descriptor import StagingBufferDescriptor, StagingRing

ROUND_TRIP_COUNT = 4
"""The first one also makes the connection; the quickest counts."""

MEASURE_COUNT = 3
"""How often each of the two transfers is measured; the quickest counts."""

SHORT_RUN_NBYTES = 1024
"""Runs whose price is measured; short enough that their bytes are no matter."""

LANE_TIMEOUT_S = 10.0
"""How long dialling and measuring a lane may take, its first connection included."""


class LanePhase(StrEnum):
    DIALING = "dialing"
    MEASURING = "measuring"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Lane:
    """One target rank. name: of its transport connection. link: its address, as dialled.

    public_key: of the target server, "" if it has no keys.
    region: of the slots, among those of the connection. free: slots that may be written.
    is_mapped: puts are copies by this process, so one put can gather many runs.
    held: per transfer id, how many slots it has taken.
    """

    name: str
    link: str
    ring: int
    region: int
    slot_nbytes: int
    slot_count: int
    opened_at: float
    free: deque[int]
    public_key: str = ""
    is_mapped: bool = False
    phase: LanePhase = LanePhase.DIALING
    next_sequence: int = 1
    held: Counter[int] = field(default_factory=Counter)
    round_trips_s: list[float] = field(default_factory=list)
    asked_at: float = 0.0
    measured_s: list[float] = field(default_factory=list)
    cost: LinkCost | None = None

    @staticmethod
    def of(
        name: str,
        staging_buffer: StagingBufferDescriptor,
        ring: StagingRing,
        region: int,
        transports: str,
        now: float,
    ) -> Lane:
        """transports: those that carry the connection's puts."""
        return Lane(
            name=name,
            link=staging_buffer.address,
            ring=ring.ring,
            region=region,
            slot_nbytes=staging_buffer.slot_nbytes,
            slot_count=len(ring.slots),
            opened_at=now,
            free=deque(ring.slots),
            public_key=staging_buffer.public_key,
            is_mapped=transports == "posix",
        )

    @property
    def slots_per_transfer_max(self) -> int:
        """Slots of one transfer. A stalled transfer leaves the other slots to other transfers."""
        return max(1, self.slot_count * 3 // 4)

    def take_slot(self, transfer_id: int) -> int | None:
        """A slot to write; None if this transfer has to wait for one."""
        if not self.free or self.held[transfer_id] >= self.slots_per_transfer_max:
            return None
        self.held[transfer_id] += 1
        return self.free.popleft()

    def put_back(self, slot: int, transfer_id: int) -> None:
        assert slot not in self.free and self.held[transfer_id] > 0
        self.free.append(slot)
        self.held[transfer_id] -= 1
        if not self.held[transfer_id]:
            del self.held[transfer_id]

    def take_sequence(self) -> int:
        self.next_sequence += 1
        return self.next_sequence - 1

    # ---- measuring -------------------------------------------------------------------------------

    def next_measurement(self, source_region: int, nbytes: int) -> CopyPlan | None:
        """One long run and many short ones in turn; None after the last measurement."""
        count = len(self.measured_s)
        if count == 2 * MEASURE_COUNT:
            return None
        starts = np.zeros(1, dtype=np.int64)
        sizes = np.full(1, nbytes, dtype=np.int64)
        if count % 2 and nbytes > SHORT_RUN_NBYTES:
            starts = short_run_starts(nbytes)
            sizes = np.full(len(starts), SHORT_RUN_NBYTES, dtype=np.int64)
        slot_start = self.free[0] * self.slot_nbytes
        return CopyPlan(
            np.full(len(starts), source_region, dtype=np.int64),
            starts,
            np.full(len(starts), self.region, dtype=np.int64),
            slot_start + starts,
            sizes,
        )

    def settle_measurement(self, nbytes: int, copies: CopyCosts) -> None:
        self.cost = measured_cost(
            slot_nbytes=nbytes,
            one_put_s=min(self.measured_s[0::2]),
            run_count=max(2, nbytes // SHORT_RUN_NBYTES),
            many_puts_s=min(self.measured_s[1::2]),
            copies=copies,
            round_trip_s=min(self.round_trips_s),
        )


def short_run_starts(nbytes: int) -> Int64Array:
    """Starts of all short runs of a slot, in an order in which no run follows its neighbour."""
    starts = np.arange(0, nbytes - SHORT_RUN_NBYTES + 1, SHORT_RUN_NBYTES, dtype=np.int64)
    return np.concatenate((starts[0::2], starts[1::2]))

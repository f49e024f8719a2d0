"""Values of the source side: a staged transfer, its sent pieces, and the events of its lanes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.planner.copies import Pages
from common.planner.staging import StagedPair, StagedPiece
from common.transport.transport import TransferSettled
from common.worker.staging.lanes import Lane


@dataclass(slots=True, eq=False)
class StagedTransfer:
    """One transfer. waiting: pieces that have no slot yet. open_count: pieces that have one."""

    tag: int
    lane: Lane
    transfer_id: int
    pair: StagedPair
    source_pages: Pages
    waiting: deque[StagedPiece]
    started_at: float
    open_count: int = 0
    error: str = ""
    nbytes: int = 0
    put_count: int = 0


@dataclass(slots=True, eq=False)
class SentPiece:
    """A piece that has a slot: its put runs, then its SlotFreed is awaited.

    buffer: in which it was gathered; None if the put itself gathers.
    sent_at: time of its SlotFilled; 0.0 until one was sent.
    """

    transfer: StagedTransfer
    piece: StagedPiece
    slot: int
    buffer: int | None
    sent_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneReady:
    """A lane can be used."""

    name: str


@dataclass(frozen=True, slots=True)
class LaneFailed:
    """A lane can't be used."""

    name: str
    reason: str


StagingEvent = TransferSettled | LaneReady | LaneFailed


@dataclass(slots=True)
class MeasuringPut:
    """A put that measures a lane. nbytes: of the whole measurement."""

    lane: Lane
    nbytes: int


@dataclass(slots=True)
class SourceCounters:
    """Since start. repeated: messages sent again. stale: answers to no open question."""

    pieces: int = 0
    nbytes: int = 0
    repeated: int = 0
    stale: int = 0

"""One staged transfer and its pieces on the way, and what staging tells of them. Values."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.planner.copies import Pages
from common.planner.staging import Piece, StagedPair
from common.transport.transport import TransferSettled
from common.worker.staging.lanes import Lane


@dataclass(slots=True, eq=False)
class Job:
    """One transfer. waiting: pieces that have not left; open_count: those that are on their way."""

    tag: int
    lane: Lane
    transfer_id: int
    pair: StagedPair
    source_pages: Pages
    waiting: deque[Piece]
    started_at: float
    open_count: int = 0
    error: str = ""
    nbytes: int = 0
    put_count: int = 0


@dataclass(slots=True, eq=False)
class Moving:
    """A piece on its way: its put, then its credit. sent_at: of its Landed, 0.0 if not sent yet.

    buffer: what it was gathered in; None if it is put together at the target.
    """

    job: Job
    piece: Piece
    slot: int
    buffer: int | None
    sent_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneReady:
    """A lane can be used."""

    name: str


@dataclass(frozen=True, slots=True)
class LaneFailed:
    """A lane could not be made or used."""

    name: str
    reason: str


StagingEvent = TransferSettled | LaneReady | LaneFailed


@dataclass(slots=True)
class Measuring:
    lane: Lane
    nbytes: int


@dataclass(slots=True)
class StagingCounters:
    """Since start. repeated: messages sent again; stale: answers nobody waited for."""

    pieces: int = 0
    nbytes: int = 0
    repeated: int = 0
    stale: int = 0

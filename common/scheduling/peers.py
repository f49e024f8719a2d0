"""What both schedulers share about their peers: effects to emit, and whether a peer is still heard.

Knows nothing of roles, sockets or threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.protocol.local import SchedulerToFrontend, SchedulerToWorker
from common.protocol.peer import Heartbeat
from common.scheduling.events import (
    Dial,
    Effect,
    HangUp,
    PeerMessage,
    Report,
    ToFrontend,
    ToPeer,
    ToWorkers,
    WatchProcesses,
)

# A peer is told of every HEARTBEAT_INTERVAL_S and given up after PEER_TIMEOUT_S of silence. The
# scheduler runs no tensor code, so only a frozen, dead or unreachable peer is silent that long;
# four beats leave room for a machine whose cores are all taken by the engine.
HEARTBEAT_INTERVAL_S = 0.5
PEER_TIMEOUT_S = 2.0
# How often an unanswered Hello is repeated, and how long a refused peer is left alone.
HELLO_INTERVAL_S = 0.5
REFUSED_RETRY_S = 5.0


class Outbox:
    """Effects of the event being handled, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def to_frontend(self, message: SchedulerToFrontend) -> None:
        self._effects.append(ToFrontend(message))

    def to_workers(self, message: SchedulerToWorker) -> None:
        self._effects.append(ToWorkers(message))

    def to_peer(self, link: str, message: PeerMessage) -> None:
        self._effects.append(ToPeer(link, message))

    def dial(self, link: str) -> None:
        self._effects.append(Dial(link))

    def hang_up(self, link: str) -> None:
        self._effects.append(HangUp(link))

    def watch_processes(self, incarnation: str, pids: tuple[int, ...]) -> None:
        self._effects.append(WatchProcesses(incarnation, pids))

    def report(self, text: str, *, is_warning: bool = False) -> None:
        self._effects.append(Report(text, is_warning))

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


@dataclass(slots=True)
class Liveness:
    """When one peer was last heard and is next to be told."""

    heard_at: float
    next_beat_at: float
    sequence: int = 0
    progress: int = 0
    is_busy: bool = False
    load_tokens: int = 0

    @staticmethod
    def start(now: float) -> Liveness:
        return Liveness(heard_at=now, next_beat_at=now)

    def apply_heartbeat(self, beat: Heartbeat, now: float) -> None:
        self.heard_at = now
        self.progress = beat.progress
        self.is_busy = beat.is_busy
        self.load_tokens = beat.load_tokens

    def is_silent(self, now: float) -> bool:
        return now - self.heard_at > PEER_TIMEOUT_S

    def next_heartbeat(
        self, incarnation: str, now: float, *, progress: int, is_busy: bool, load_tokens: int
    ) -> Heartbeat | None:
        """A beat if one is due."""
        if now < self.next_beat_at:
            return None
        self.sequence += 1
        self.next_beat_at = now + HEARTBEAT_INTERVAL_S
        return Heartbeat(incarnation, self.sequence, progress, is_busy, load_tokens)


@dataclass(slots=True)
class RankSet:
    """Which of this server's worker ranks have answered; complete when all have."""

    size: int
    answered: set[int] = field(default_factory=set)

    def add(self, rank: int) -> bool:
        """Note an answer; True if it was the last one missing."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        if rank in self.answered:
            return False
        self.answered.add(rank)
        return len(self.answered) == self.size

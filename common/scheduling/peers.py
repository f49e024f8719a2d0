"""What both schedulers share about their peers: effects to emit, and whether a peer is still heard.

Knows nothing of roles, sockets or threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from common.protocol.frontend import ToldFrontend
from common.protocol.peer import Heartbeat, PeerMessage
from common.protocol.worker import SchedulerToWorker
from common.scheduling.events import (
    Dial,
    Effect,
    GiveUp,
    HangUp,
    Report,
    ToFrontend,
    ToPeer,
    ToWorkers,
    WatchProcesses,
)
from common.scheduling.facts import Pace
from common.scheduling.worker_health import SilenceTimer

# How often an unanswered Hello is repeated, and how long a refused peer is left alone.
HELLO_INTERVAL_S = 0.5
REFUSED_RETRY_S = 5.0


class Outbox:
    """Effects of the event being handled, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def to_frontend(self, message: ToldFrontend) -> None:
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

    def report_end(
        self, request_count: int, peer_count: int, counters: Mapping[str, float]
    ) -> None:
        """The last line of a server that was told to stop. request_count: of those given up."""
        counts = ", ".join(f"{name} {count:.0f}" for name, count in counters.items() if count)
        self.report(
            f"stopping: {peer_count} peers are told, {request_count} requests are given up; "
            f"since the start: {counts or 'no requests'}"
        )

    def give_up(self, reason: str) -> None:
        self._effects.append(GiveUp(reason))

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


STOPPING_REASON = "it was told to stop"
"""What peers are told by a server that ends as planned."""
REMOVED_REASON = "removed from the prefill servers of that decode server"
"""What a prefill server is told, and the log of the decode server has too."""


class Condition(msgspec.Struct, frozen=True):
    """What a server's heartbeats say of it; see `Heartbeat`."""

    progress: int
    is_busy: bool
    trouble: str
    is_draining: bool = False
    queued_token_count: int = 0
    running_count: int = 0
    cached_prefixes: bytes | None = None


@dataclass(slots=True)
class PeerLiveness:
    """When one peer was last heard and is next to be told, and what it said of itself."""

    silence: SilenceTimer
    next_beat_at: float
    sequence: int = 0
    progress: int = 0
    is_busy: bool = False
    trouble: str = ""
    is_draining: bool = False
    queued_token_count: int = 0

    @staticmethod
    def start(now: float) -> PeerLiveness:
        return PeerLiveness(SilenceTimer(now), next_beat_at=now)

    def apply_heartbeat(self, beat: Heartbeat) -> None:
        self.silence.hear()
        self.trouble = beat.trouble
        self.is_draining = beat.is_draining
        self.progress = beat.progress
        self.is_busy = beat.is_busy
        self.queued_token_count = beat.queued_token_count

    def why_lost(self, now: float, pace: Pace) -> str:
        """Why the peer is of no use any more, "" as long as it is."""
        if self.silence.update(now) > pace.timeout_s:
            return f"no heartbeat for {pace.timeout_s:g} s"
        return f"in its own words: {self.trouble}" if self.trouble else ""

    def next_heartbeat(
        self, incarnation: str, now: float, pace: Pace, condition: Condition
    ) -> Heartbeat | None:
        """A beat if one is due, without credits."""
        if now < self.next_beat_at:
            return None
        self.sequence += 1
        self.next_beat_at = now + pace.interval_s
        return Heartbeat(
            incarnation,
            self.sequence,
            condition.progress,
            condition.is_busy,
            queued_token_count=condition.queued_token_count,
            running_count=condition.running_count,
            trouble=condition.trouble,
            is_draining=condition.is_draining,
        )


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

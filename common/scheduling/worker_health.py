"""How long something has been silent, and whether this server's own workers are alive and move.

A worker's I/O thread beats whatever its engine does, and tells how far that has come: finished
layers, and on a CPU the time that the engine's thread has computed. So a long forward pass is told
from a stuck one, and a stuck engine from a frozen process. Knows nothing of sockets or peers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.scheduling.facts import Pace, ServerFacts

# The longest time between two looks that counts as listening. A longer one means that this very
# process did not run: messages of that time have not been read yet, and no peer is to blame.
LOOK_GAP_MAX_S = 0.4


@dataclass(slots=True)
class SilenceTimer:
    """Seconds in which we listened for something and did not hear it.

    gap_max_s: the longest time between two looks that counts as listening.
    """

    looked_at: float
    seconds: float = 0.0
    gap_max_s: float = LOOK_GAP_MAX_S

    def hear(self) -> None:
        self.seconds = 0.0

    def update(self, now: float) -> float:
        """The silence until now; to be called at least every `gap_max_s`."""
        gap = now - self.looked_at
        if gap > 0.0:
            self.seconds += gap if gap < self.gap_max_s else self.gap_max_s
        self.looked_at = now
        return self.seconds


@dataclass(slots=True)
class _Rank:
    progress: int = 0
    silence: SilenceTimer | None = None


@dataclass(slots=True)
class WorkerHealth:
    """What this server's workers say of themselves, and what the system says of their processes.

    stall_s: without progress in a step, until that is trouble; the ranks of a step wait for each
    other, so the engine moves if any of them does. silence_s: without a beat of a worker, unless it
    is one of stopped_ranks: its process is stopped, so that silence is no matter of load.
    """

    rank_count: int
    stall_s: float
    silence_s: float
    stopped_ranks: tuple[int, ...] = ()
    progress: int = 0
    trouble: str = ""
    _ranks: list[_Rank] = field(init=False)
    _standstill: SilenceTimer | None = None

    @staticmethod
    def of(facts: ServerFacts, pace: Pace) -> WorkerHealth:
        """Of the workers of the server that these are of."""
        return WorkerHealth(facts.rank_count, pace.stall_s, pace.worker_s)

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.rank_count)]

    def apply_beat(self, rank: int, progress: int) -> None:
        known = self._ranks[rank]
        if known.silence is not None:
            known.silence.hear()
        if progress != known.progress and self._standstill is not None:
            self._standstill.hear()
        known.progress = progress
        self.progress = sum(one.progress for one in self._ranks)

    def check(self, now: float, *, is_busy: bool) -> str:
        """What is the matter now, "" if nothing is. is_busy: a step is due to be computed."""
        self.trouble = self._find_trouble(now, is_busy=is_busy)
        return self.trouble

    def _find_trouble(self, now: float, *, is_busy: bool) -> str:
        silent = ""
        for index, rank in enumerate(self._ranks):
            rank.silence = rank.silence or SilenceTimer(now)
            seconds = rank.silence.update(now)
            if index in self.stopped_ranks and seconds > self.silence_s / 2:
                silent = silent or f"worker {index} is stopped"
            if seconds > self.silence_s:
                silent = silent or f"worker {index} has been silent for {self.silence_s:g} s"
        self._standstill = self._standstill or SilenceTimer(now)
        if not is_busy:
            self._standstill.hear()
        if self._standstill.update(now) > self.stall_s and not silent:
            return f"the engine has not moved for {self.stall_s:g} s"
        return silent

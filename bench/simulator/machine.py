"""Cores that share their time evenly among their jobs, and a calendar: the clock of a simulation.

Knows nothing of servers. The same calls in the same order give the same times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


@dataclass(slots=True)
class _Core:
    """virtual_s: work that a job has been given that was there all along. A job ends once it has
    grown by the job's own work. jobs: (virtual_s at its end, order, what then). version: of its
    entry in the calendar; older ones are void."""

    virtual_s: float = 0.0
    told_s: float = 0.0
    jobs: list[tuple[float, int, Action]] = field(default_factory=list)
    version: int = 0


class Machine:
    """Time passes inside `run` only."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._cores: dict[int, _Core] = {}
        self._calendar: list[tuple[float, int, Action]] = []  # (when, order, what)
        self._order = 0

    def at(self, time_s: float, action: Action) -> None:
        """Do something at a time that is not past."""
        assert time_s >= self.now_s
        self._enter(time_s, action)

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def work(self, core_id: int, work_s: float, action: Action) -> None:
        """Begin a job that takes `work_s` where it is alone, and do something once it is done."""
        assert work_s >= 0
        core = self._cores.setdefault(core_id, _Core())
        self._catch_up(core)
        self._order += 1
        heapq.heappush(core.jobs, (core.virtual_s + work_s, self._order, action))
        self._schedule(core)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._calendar:
            self.now_s, _, action = heapq.heappop(self._calendar)
            action()

    def _enter(self, time_s: float, action: Action) -> None:
        self._order += 1
        heapq.heappush(self._calendar, (time_s, self._order, action))

    def _catch_up(self, core: _Core) -> None:
        if core.jobs:
            core.virtual_s += (self.now_s - core.told_s) / len(core.jobs)
        core.told_s = self.now_s

    def _schedule(self, core: _Core) -> None:
        core.version += 1
        if not core.jobs:
            return
        left_s = max(0.0, core.jobs[0][0] - core.virtual_s)
        version = core.version
        end_s = self.now_s + left_s * len(core.jobs)
        self._enter(end_s, lambda: self._end_first(core, version))

    def _end_first(self, core: _Core, version: int) -> None:
        if version != core.version:
            return  # a job came in between, so that this one ends later
        self._catch_up(core)
        end_s, _, action = heapq.heappop(core.jobs)
        core.virtual_s = end_s  # not what rounding left of it
        self._schedule(core)
        action()

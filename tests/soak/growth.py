"""What each server process holds over time, and whether it grows after a warm-up."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.soak.servers import ProcessUse, Server, read_use

# Resident memory may grow this much after the warm-up: fragments, not a leak.
GROWTH_MAX = 0.05
# asyncio makes the threads of its pool when they are first needed all at once, up to this many.
POOL_THREAD_COUNT_MAX = min(32, (os.cpu_count() or 1) + 4)
MB = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    use: ProcessUse


@dataclass(frozen=True, slots=True)
class Growth:
    """One process, from right after the warm-up to the end. problem: "" if it did not grow."""

    process: str
    row: str
    problem: str

    HEAD = f"{'RSS MB':>9}{'growth MB':>11}{'%':>7}{'fds':>10}{'threads':>12}"


@dataclass(slots=True)
class UseLog:
    """Samples of every process; one that was started again begins anew. warm_up_s: from the first
    sample on."""

    warm_up_s: float
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)

    def sample(self, servers: Sequence[Server]) -> None:
        now = time.monotonic()
        for server in servers:
            for part, pid in server.pids().items():
                use = read_use(pid)
                if use is None:
                    continue
                name = f"{server.role} {part}"
                if self._pids.get(name) != pid:
                    self._pids[name] = pid
                    self.samples[name] = []
                self.samples[name].append(Sample(now, use))

    def total_rss_mb(self) -> float:
        """Of the last sample; pages that processes share count in each."""
        return sum(series[-1].use.rss_nbytes for series in self.samples.values()) / MB

    def starved_share(self, process: str) -> float:
        """Cores that a process wanted and did not get between its last two samples."""
        series = self.samples.get(process, [])
        if len(series) < 2:
            return 0.0
        before, after = series[-2], series[-1]
        return (after.use.ready_s - before.use.ready_s) / (after.at - before.at)

    def growths(self, sample_count_min: int = 1) -> list[Growth]:
        """Of the processes that have lived through so many samples."""
        return [
            self._growth(name, series)
            for name, series in sorted(self.samples.items())
            if len(series) >= sample_count_min
        ]

    def _growth(self, name: str, series: list[Sample]) -> Growth:
        """Medians of the tenth after the warm-up and of the last tenth are compared."""
        warm = [one for one in series if one.at - series[0].at >= self.warm_up_s]
        is_young = not warm  # it was restarted: shown, and not judged
        warm = warm or series
        share = max(1, len(warm) // 10)
        first, last = warm[:share], warm[-share:]
        before = statistics.median(one.use.rss_nbytes for one in first)
        after = statistics.median(one.use.rss_nbytes for one in last)
        growth = after - before
        fds_before = max(one.use.fd_count for one in series)
        threads_before = max(one.use.thread_count for one in first)
        rest = series[-1].use
        row = (
            f"{after / MB:9.1f}{growth / MB:+11.2f}{growth / before:+7.1%}"
            f"{fds_before:>5}>{rest.fd_count:<4}{threads_before:>6}>{rest.thread_count:<4}"
        )
        problem = ""
        if is_young:
            return Growth(name, f"{row}  (restarted)", "")
        if growth > GROWTH_MAX * before:
            problem = f"{name} grew by {growth / MB:.1f} MB ({growth / before:.1%})"
        elif rest.thread_count > threads_before + POOL_THREAD_COUNT_MAX:
            problem = f"{name} has {rest.thread_count} threads, {threads_before} before"
        elif rest.fd_count > first[0].use.fd_count:
            held = f"{rest.fd_count} files at rest, {first[0].use.fd_count} under load"
            problem = f"{name} holds {held}"
        return Growth(name, row, problem)

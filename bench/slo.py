"""Service level objectives of latency, and the highest rate at which a service keeps them.

Pure: the caller measures or simulates a rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.serve.outcome import Run
from bench.serve.summary import Summary, summarize


@dataclass(frozen=True, slots=True)
class Slo:
    """At `rank` of 100, no request may wait longer than ttft_ms for its first token, nor any token
    longer than itl_ms for the one after it."""

    ttft_ms: float
    itl_ms: float
    rank: float = 90.0

    def summarize(self, run: Run) -> Summary:
        return summarize(run, (50.0, self.rank), {})

    def found_ms(self, summary: Summary) -> tuple[float, float]:
        """(ttft, itl) at the rank; 0 where a run had no such thing, as gaps of single tokens."""
        key = f"p{self.rank:g}"
        ttft, itl = (summary.latencies.get(metric, {}).get(key, 0.0) for metric in ("ttft", "itl"))
        return ttft, itl

    def is_kept(self, run: Run) -> bool:
        """Whether all requests were answered, and fast enough."""
        summary = self.summarize(run)
        ttft_ms, itl_ms = self.found_ms(summary)
        return not summary.errors and ttft_ms <= self.ttft_ms and itl_ms <= self.itl_ms


def find_goodput(is_kept: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """The highest rate between low and high that keeps a promise, by halving the range's logarithm
    `steps` times: exact to a factor of (high / low) ** (1 / 2 ** steps).

    Returns: a rate that was tried and kept it; 0 if none did.
    """
    assert 0 < low < high
    kept = 0.0
    for _ in range(steps):
        rate = math.sqrt(low * high)
        if is_kept(rate):
            kept = low = rate
        else:
            high = rate
    return kept

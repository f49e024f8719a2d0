"""Counters and histograms that one thread counts in and reads: without locks, labels as they come.

prometheus_client's instruments take several locks for an observation, look labels up in as long
again, and search buckets one after another. A frontend counts with every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Counter:
    """Counts by values of `label_names`, each value from its first count on."""

    def __init__(self, name: str, text: str, label_names: Labels = ()) -> None:
        self._name, self._text, self._label_names = name, text, label_names
        self._values: dict[Labels, float] = {} if label_names else {(): 0.0}

    def inc(self, count: float, *labels: str) -> None:
        assert len(labels) == len(self._label_names)
        self._values[labels] = self._values.get(labels, 0.0) + count

    def collect(self) -> Iterator[Family]:
        family = CounterMetricFamily(self._name, self._text, labels=self._label_names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Histogram:
    """bounds: upper ones, inclusive, in order; infinity is added."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label_names: Labels = ()
    ) -> None:
        assert list(bounds) == sorted(bounds)
        self._name, self._text, self._label_names = name, text, label_names
        self._bounds = tuple(map(float, bounds))
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        if not label_names:
            self._begin(())

    def observe(self, value: float, *labels: str, count: int = 1) -> None:
        """`count` observations of the same value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._begin(labels)
        counts[bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def collect(self) -> Iterator[Family]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        names: list[str] = [
            floatToGoString(bound)  # type: ignore[no-untyped-call]
            for bound in (*self._bounds, float("inf"))
        ]
        for labels, counts in self._counts.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family

    def _begin(self, labels: Labels) -> list[int]:
        assert len(labels) == len(self._label_names)
        self._sums[labels] = 0.0
        self._counts[labels] = [0] * (len(self._bounds) + 1)
        return self._counts[labels]

"""Counters and histograms that one thread counts in and reads: without locks, labels as they come.

prometheus_client's instruments take several locks for an observation, look labels up in as long
again, and search buckets one after another. A frontend counts with every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
RETIRED = "\0"  # value of a label whose former value is not shown any more, and no name of anything


class Counter:
    """Counts by values of `label_names`, each value from its first count on."""

    def __init__(self, name: str, text: str, label_names: Labels = ()) -> None:
        self._name, self._text, self.label_names = name, text, label_names
        self._values: dict[Labels, float] = {} if label_names else {(): 0.0}

    def inc(self, count: float, *labels: str) -> None:
        assert len(labels) == len(self.label_names)
        self._values[labels] = self._values.get(labels, 0.0) + count

    def retire(self, label_name: str, value: str) -> None:
        """What was counted with a value of a label stays as `RETIRED`, in sums over the label."""
        for labels, retired in _retirements(self._values, self.label_names, label_name, value):
            self.inc(self._values.pop(labels), *retired)

    def collect(self) -> Iterator[Family]:
        family = CounterMetricFamily(self._name, self._text, labels=self.label_names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Histogram:
    """bounds: upper ones, inclusive, in order; infinity is added."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label_names: Labels = ()
    ) -> None:
        assert list(bounds) == sorted(bounds)
        self._name, self._text, self.label_names = name, text, label_names
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

    def retire(self, label_name: str, value: str) -> None:
        """As `Counter.retire`."""
        for labels, retired in _retirements(self._counts, self.label_names, label_name, value):
            before = self._counts.get(retired) or self._begin(retired)
            added = self._counts.pop(labels)
            self._counts[retired] = [old + new for old, new in zip(before, added, strict=True)]
            self._sums[retired] += self._sums.pop(labels)

    def collect(self) -> Iterator[Family]:
        family = HistogramMetricFamily(self._name, self._text, labels=self.label_names)
        names: list[str] = [
            floatToGoString(bound)  # type: ignore[no-untyped-call]
            for bound in (*self._bounds, float("inf"))
        ]
        for labels, counts in self._counts.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family

    def _begin(self, labels: Labels) -> list[int]:
        assert len(labels) == len(self.label_names)
        self._sums[labels] = 0.0
        self._counts[labels] = [0] * (len(self._bounds) + 1)
        return self._counts[labels]


def _retirements(
    known: Iterable[Labels], names: Labels, name: str, value: str
) -> list[tuple[Labels, Labels]]:
    """Labels with a value, and the same with `RETIRED` in its place."""
    index = names.index(name)
    return [
        (labels, (*labels[:index], RETIRED, *labels[index + 1 :]))
        for labels in known
        if labels[index] == value
    ]

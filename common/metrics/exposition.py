"""The exposition that Prometheus reads: the views of every metric, with the base labels.

Knows nothing of the code that measures. A view sums over the labels that it leaves out, values
that are retired included; it shows none of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from common.config import EngineType, MetricsNames
from common.metrics.definitions import Kind, Metric, View
from common.metrics.instruments import RETIRED, Counter, Histogram
from common.metrics.recorded import RECORDED
from common.metrics.seen import COUNTERS, QUEUES, SEEN
from common.metrics.snapshot import Seen, Snapshot, queue_depth, see, sum_of

Instrument = Counter | Histogram


@dataclass(frozen=True, slots=True)
class _Sample:
    """suffix: what follows the family's name, such as _bucket."""

    suffix: str
    labels: dict[str, str]
    value: float


class Exposition(Collector):
    """Collects everything in the order of the table. snapshot: the present gauges."""

    def __init__(
        self,
        instruments: dict[str, Instrument],
        model_name: str,
        engine_type: EngineType,
        names: MetricsNames,
    ) -> None:
        self.snapshot = Snapshot()
        self._instruments = instruments
        self._base = {"model_name": model_name, "engine_type": str(engine_type)}
        self._names = names

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        now = self.snapshot
        for metric in QUEUES:
            yield from self._views(metric, [_seen(metric, {}, queue_depth(now, metric.key))])
        for metric in COUNTERS:
            yield from self._views(metric, [_seen(metric, {}, sum_of(now, metric.key))])
        seen: dict[str, list[Seen]] = {metric.key: [] for metric in SEEN}
        for one in see(now):
            seen[one.key].append(one)
        for metric in SEEN:
            samples = [_seen(metric, _named(metric, one), one.value) for one in seen[metric.key]]
            yield from self._views(metric, samples)
        for metric in RECORDED:
            yield from self._views(metric, list(_recorded(self._instruments[metric.key])))

    def _views(self, metric: Metric, samples: list[_Sample]) -> Iterator[Family]:
        for view in metric.views:
            if view.is_shown(self._names):
                base = self._base
                if view.name.startswith("vllm:"):
                    base = base | {"engine": "0"}
                family = Family(view.name, metric.text, metric.kind)
                for sample in _project(view, samples, metric.kind):
                    family.add_sample(view.name + sample.suffix, base | sample.labels, sample.value)
                yield family


def _project(view: View, samples: Iterable[_Sample], kind: Kind) -> Iterator[_Sample]:
    """The samples of one view, in the order in which they came."""
    sums: dict[tuple[str, ...], _Sample] = {}
    for sample in samples:
        if view.only is not None and sample.labels[view.only[0]] != view.only[1]:
            continue
        kept = {name: sample.labels[name] for name in view.labels}
        if RETIRED in kept.values():
            continue
        if "le" in sample.labels:
            kept["le"] = sample.labels["le"]
        key = (sample.suffix, *kept.values())
        before = sums[key].value if key in sums else 0.0
        sums[key] = _Sample(sample.suffix, kept, before + sample.value)
    if not sums and kind is Kind.COUNTER and not view.labels:
        return iter([_Sample("_total", {}, 0.0)])
    return iter(sums.values())


def _recorded(instrument: Instrument) -> Iterator[_Sample]:
    for family in instrument.collect():
        for sample in family.samples:
            yield _Sample(sample.name.removeprefix(family.name), sample.labels, sample.value)


def _named(metric: Metric, one: Seen) -> dict[str, str]:
    return dict(zip(metric.labels, one.labels, strict=True))


def _seen(metric: Metric, labels: dict[str, str], value: float) -> _Sample:
    return _Sample("_total" if metric.kind is Kind.COUNTER else "", labels, value)

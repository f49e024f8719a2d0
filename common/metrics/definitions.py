"""Definition of a metric: a key, a type, labels, and the names under which it is shown.

The table itself is in `recorded.py` and `seen.py`. The counting code, the exposition and the
printed reference read it. Every quantity is measured once; SGLang's and vLLM's names are views of
it. Metrics that only this server has are called `baton:`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.config import MetricsNames


class Kind(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Side(StrEnum):
    """Which servers have values for it."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class View:
    """A name under which a metric is shown, counters without `_total`.

    labels: those of the metric's that it has; over the others it is summed.
    only: the one value of a label that it shows; None: all.
    """

    name: str
    labels: tuple[str, ...] = ()
    only: tuple[str, str] | None = None

    def is_shown(self, names: MetricsNames) -> bool:
        family = self.name.partition(":")[0]
        return family == "baton" or names in (MetricsNames.BOTH, family)


@dataclass(frozen=True, slots=True)
class Metric:
    """One quantity that is measured. key: its name in the code.

    labels: besides those that every metric has. starts_at: values of the labels that are known
    beforehand; they start at 0, so that a dashboard finds them and a rate over the first event is
    right. A counter without labels always starts so.
    """

    key: str
    kind: Kind
    text: str
    views: tuple[View, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    side: Side = Side.BOTH
    starts_at: tuple[tuple[str, ...], ...] = ()

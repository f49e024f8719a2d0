"""Our counters and histograms tell what prometheus_client's tell of the same observations."""

from __future__ import annotations

import random

import prometheus_client
import pytest
from prometheus_client.core import Metric as Family

from common.metrics.instruments import Counter, Histogram

BOUNDS = (0.001, 0.5, 1, 20)
VALUES = (0.0, 0.001, 0.0011, 0.5, 0.7, 1.0, 19.0, 20.0, 20.1, 1e9)


def samples(families: object) -> list[tuple[str, dict[str, str], float]]:
    found: list[tuple[str, dict[str, str], float]] = []
    for family in families:  # type: ignore[attr-defined]
        assert isinstance(family, Family)
        found += [(one.name, one.labels, pytest.approx(one.value)) for one in family.samples]
    return [one for one in found if not one[0].endswith("_created")]


@pytest.mark.parametrize("label_names", [(), ("stage", "peer")])
def test_a_histogram_tells_what_the_reference_tells(label_names: tuple[str, ...]) -> None:
    own = Histogram("wait", "Text.", BOUNDS, label_names)
    reference = prometheus_client.Histogram(
        "wait", "Text.", label_names, registry=None, buckets=BOUNDS
    )
    assert samples(own.collect()) == samples(reference.collect())
    rng = random.Random(1)
    for _ in range(300):
        value, count = rng.choice(VALUES), rng.randint(1, 3)
        labels = tuple(rng.choice("ab") for _ in label_names)
        own.observe(value, *labels, count=count)
        child = reference.labels(*labels) if labels else reference
        for _ in range(count):
            child.observe(value)
    assert samples(own.collect()) == samples(reference.collect())


@pytest.mark.parametrize("label_names", [(), ("kind",)])
def test_a_counter_tells_what_the_reference_tells(label_names: tuple[str, ...]) -> None:
    own = Counter("seen", "Text.", label_names)
    reference = prometheus_client.Counter("seen", "Text.", label_names, registry=None)
    assert samples(own.collect()) == samples(reference.collect())
    rng = random.Random(2)
    for _ in range(50):
        count, labels = rng.randint(0, 5), tuple(rng.choice("ab") for _ in label_names)
        own.inc(count, *labels)
        (reference.labels(*labels) if labels else reference).inc(count)
    assert samples(own.collect()) == samples(reference.collect())

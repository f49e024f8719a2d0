"""Dashboards and alerts ask for metrics that exist, and the alerts fire when they have to."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from common.metrics.definitions import Kind
from common.metrics.recorded import RECORDED
from common.metrics.seen import COUNTERS, QUEUES, SEEN
from tests.metrics.dashboards import DASHBOARDS, DEPLOY, PROMETHEUS, alerts, queries

NAME = re.compile(r"\b(?:baton|sglang|vllm):[a-zA-Z0-9_]+")
SUFFIXES = {
    Kind.GAUGE: ("",),
    Kind.COUNTER: ("_total",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
SHOWN = {
    f"{view.name}{suffix}"
    for metric in (*RECORDED, *QUEUES, *COUNTERS, *SEEN)
    for view in metric.views
    for suffix in SUFFIXES[metric.kind]
}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def test_every_query_and_every_alert_asks_for_metrics_that_exist() -> None:
    asked = [*alerts().values(), *(q for path in DASHBOARDS for q in queries(path).values())]
    names = {name for expression in asked for name in NAME.findall(expression)}
    assert len(DASHBOARDS) == 1 and len(names) > 25
    assert names - SHOWN == set()


def test_dashboards_have_no_two_panels_in_one_place() -> None:
    for path in DASHBOARDS:
        places = re.findall(r'"gridPos": (\{.*?\})', path.read_text())
        assert len(set(places)) == len(places) > 0


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize("words", ["check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool_agrees(words: str) -> None:
    done = subprocess.run(
        ["promtool", *words.split()], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_firing() -> None:
    tested = (PROMETHEUS / "alerts_test.yml").read_text()
    missing = [name for name in alerts() if f'alertname="{name}"' not in tested]
    assert missing == []


def test_the_reference_names_what_is_shown() -> None:
    told = set(NAME.findall((DEPLOY / "METRICS.md").read_text()))
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SHOWN}
    assert plain == {re.sub(r"_count$", "", name) for name in told}

"""What a run comes to, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.serve.outcome import Outcome, Run
from bench.serve.summary import concurrency_steps, describe, measure, summarize
from bench.serve.workload import Ask


def outcome_of(
    sent_s: float, arrivals: list[tuple[float, int]], *, due_s: float = 0.0, began_s: float = 0.0
) -> Outcome:
    """A request that went well and ended 0.1 s after its last token."""
    return Outcome(
        Ask(0, due_s, (1, 2, 3), arrivals[-1][1]),
        due_s=due_s,
        began_s=began_s,
        sent_s=sent_s,
        ended_s=arrivals[-1][0] + 0.1,
        arrivals=arrivals,
        prompt_count=3,
        output_count=arrivals[-1][1],
    )


def failed(kind: str, text: str) -> Outcome:
    return Outcome(Ask(0, 0.0, (1,), 1), due_s=0.0, ended_s=0.5, error_kind=kind, error=text)


def test_tokens_that_came_together_share_the_time_before_them() -> None:
    one = measure(outcome_of(1.0, [(1.5, 1), (1.8, 4), (1.9, 5)]))
    assert one.ttft == pytest.approx(500)
    assert one.itls == pytest.approx([100, 100, 100, 100])
    assert one.tpot == pytest.approx(100)
    assert one.e2el == pytest.approx(1000)


def test_one_token_has_no_time_per_token() -> None:
    one = measure(outcome_of(0.0, [(0.25, 1)]))
    assert (one.tpot, one.itls) == (None, [])
    run = Run([outcome_of(0.0, [(0.25, 1)])], 1.0, [])
    assert set(summarize(run, (50.0,), {}).latencies) == {"ttft", "e2el"}


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(1).exponential(50.0, size=257).tolist()
    told = describe(values, (50.0, 99.0, 99.9))
    assert told["p50"] == np.percentile(values, 50)
    assert told["p99"] == np.percentile(values, 99)
    assert told["p99.9"] == np.percentile(values, 99.9)
    assert told["mean"] == pytest.approx(sum(values) / 257)
    assert (told["min"], told["max"]) == (min(values), max(values))
    assert describe([1, 2, 3, 4], (50.0,))["p50"] == 2.5


def test_rates_are_of_what_went_well_over_the_whole_run() -> None:
    run = Run(
        [outcome_of(0.0, [(0.5, 1), (1.0, 9)]), failed("http 503", "full"), failed("timeout", "x")],
        duration_s=2.0,
        lags_s=[0.0],
    )
    summary = summarize(run, (50.0,), {})
    assert (summary.request_count, summary.good_count) == (3, 1)
    assert summary.request_throughput == 0.5
    assert (summary.input_token_count, summary.input_throughput) == (3, 1.5)
    assert (summary.output_token_count, summary.output_throughput) == (9, 4.5)
    assert summary.errors == {"http 503": 1, "timeout": 1}
    assert summary.error_examples == {"http 503": "full", "timeout": "x"}


@pytest.mark.parametrize(
    ("goals", "kept_count"),
    [
        ({"ttft": 500.0}, 2),
        ({"ttft": 499.0}, 1),
        ({"itl": 250.0}, 2),
        ({"itl": 249.0}, 1),  # the longest gap counts, not the mean, which is 187.5 ms
        ({"tpot": 187.5, "ttft": 500.0}, 2),
        ({"e2el": 100.0}, 0),
    ],
)
def test_a_good_request_keeps_every_goal(goals: dict[str, float], kept_count: int) -> None:
    slow = outcome_of(0.0, [(0.5, 1), (0.75, 2), (0.875, 3)])
    fast = outcome_of(0.0, [(0.25, 1), (0.3125, 2)])
    summary = summarize(Run([slow, fast, failed("timeout", "")], 4.0, []), (50.0,), goals)
    assert summary.goodput == pytest.approx(kept_count / 4.0)


def test_lateness_of_the_client_is_told_apart_from_being_held_back() -> None:
    on_time = outcome_of(3.0, [(3.5, 1)], due_s=1.0, began_s=1.0)
    assert summarize(Run([on_time], 4.0, [0.001]), (50.0,), {}).held_ms == pytest.approx(2000)
    assert summarize(Run([on_time], 4.0, [0.001]), (50.0,), {}).warnings == []
    late = outcome_of(1.2, [(3.5, 1)], due_s=1.0, began_s=1.2)
    summary = summarize(Run([late], 4.0, [0.001]), (50.0,), {})
    assert (summary.late_ms, summary.held_ms) == (pytest.approx(200), pytest.approx(0))
    assert "200 ms after their time" in summary.warnings[0]
    assert "looks 20 ms late" in summarize(Run([on_time], 4.0, [0.02]), (50.0,), {}).warnings[0]


def test_requests_under_way_are_counted_where_they_overlap() -> None:
    outcomes = [outcome_of(0.0, [(0.9, 1)]), outcome_of(0.5, [(1.4, 1)]), outcome_of(1.0, [(2, 1)])]
    steps = concurrency_steps(outcomes)
    assert max(count for _, count in steps) == 2  # one ends at 1.0, when the third is sent
    assert steps[-1][1] == 0
    run = Run(outcomes, 2.1, [])
    assert summarize(run, (50.0,), {}).mean_concurrency == pytest.approx((1 + 1 + 1.1) / 2.1)

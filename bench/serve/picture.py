"""Draws a run: how latencies are spread, and what happened when. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.axes import make_logarithmic
from bench.serve.outcome import Outcome, Run
from bench.serve.summary import Latencies, concurrency_steps, measure

MARKED_PERCENTILES = (50, 99)
BIN_COUNT = 60  # of the timeline's token rate


def draw(run: Run, title: str, path: Path) -> None:
    """Writes the picture; its kind is that of the suffix. Raises: OSError."""
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: smaller, and can be searched
    good = [outcome for outcome in run.outcomes if outcome.is_good]
    measured = [measure(outcome) for outcome in good]
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    _draw_spread(axes[0, 0], "time to first token", [one.ttft for one in measured])
    _draw_spread(axes[0, 1], "time between tokens", [itl for one in measured for itl in one.itls])
    _draw_requests(axes[1, 0], run.outcomes, measured)
    _draw_load(axes[1, 1], run)
    figure.savefig(path)


def _draw_spread(axes: Axes, name: str, values_ms: Sequence[float]) -> None:
    """Which share of the samples is below a time. Times in which nothing can have happened, of
    tokens that came together, are left at the edge of the logarithmic scale."""
    axes.set(title=name, xlabel="ms", ylabel="share below", ylim=(0, 1.02))
    axes.grid(visible=True, alpha=0.3)
    if not values_ms:
        return
    ordered = np.maximum(np.sort(np.asarray(values_ms)), 1e-3)
    axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post")
    make_logarithmic(axes.xaxis)
    for rank in MARKED_PERCENTILES:
        at_ms = float(np.percentile(values_ms, rank))
        axes.axvline(at_ms, linestyle=":", color="gray")
        shown = f"{at_ms:.0f}" if at_ms >= 100 else f"{at_ms:.3g}"
        axes.annotate(f"p{rank} {shown}", (at_ms, 0.04), rotation=90, ha="right", fontsize=8)


def _draw_requests(axes: Axes, outcomes: Sequence[Outcome], measured: Sequence[Latencies]) -> None:
    """Every request by when it was sent; the failed ones as crosses, at the time they took."""
    axes.set(title="requests by when they were sent", xlabel="s", ylabel="ms")
    axes.grid(visible=True, alpha=0.3)
    sent_s = [outcome.sent_s for outcome in outcomes if outcome.is_good]
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    axes.scatter(sent_s, [one.ttft for one in measured], s=8, label="first token")
    axes.scatter(sent_s, [one.e2el for one in measured], s=8, alpha=0.5, label="end")
    if bad:
        took_ms = [1e3 * max(outcome.ended_s - outcome.sent_s, 1e-6) for outcome in bad]
        axes.scatter(
            [outcome.sent_s for outcome in bad], took_ms, marker="x", color="red", label="failed"
        )
    if measured or bad:
        make_logarithmic(axes.yaxis)
    axes.legend(loc="best", fontsize=8)


def _draw_load(axes: Axes, run: Run) -> None:
    """Requests under way, and output tokens per second."""
    axes.set(title="load", xlabel="s", ylabel="requests under way")
    axes.grid(visible=True, alpha=0.3)
    steps = concurrency_steps(run.outcomes)
    axes.step([at_s for at_s, _ in steps], [count for _, count in steps], where="post")
    axes.set_ylim(bottom=0)
    rate_axes = axes.twinx()
    times_s, weights = _token_times(run.outcomes)
    counts, edges = np.histogram(
        times_s, bins=BIN_COUNT, range=(0.0, run.duration_s), weights=weights
    )
    rate_axes.stairs(counts / np.diff(edges), edges, color="tab:orange", alpha=0.7)
    rate_axes.set_ylim(bottom=0)
    rate_axes.set_ylabel("output tokens per second", color="tab:orange")


def _token_times(outcomes: Sequence[Outcome]) -> tuple[list[float], list[int]]:
    """When tokens came, and how many each time."""
    times_s: list[float] = []
    weights: list[int] = []
    for outcome in outcomes:
        before = 0
        for at_s, count in outcome.arrivals:
            times_s.append(at_s)
            weights.append(count - before)
            before = count
    return times_s, weights

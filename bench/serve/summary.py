"""The summary of a run: latencies and their percentiles, throughput, goodput, errors, and warnings.

Pure: takes what was noted, gives plain values. The definitions are those of `vllm bench serve` and
`sglang.bench_serving`:

    ttft  from sending a request to its first token
    itl   between two tokens; tokens that came together share the time since the ones before
    tpot  mean time of a token after a request's first
    e2el  from sending a request to the end of its answer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.serve.outcome import Outcome, Run
from bench.serve.turns import TurnSummary, cached_count_of, summarize_turns

METRICS = ("ttft", "tpot", "itl", "e2el")
# A client that is later than this does not send the load it was asked for, or notes tokens of a
# fast model noticeably late.
LATE_MS_MAX = 10.0
LAG_MS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one request that went well, in ms. tpot: None if it had one token only."""

    ttft: float
    tpot: float | None
    itls: list[float]
    e2el: float


@dataclass(frozen=True, slots=True)
class Summary:
    """duration_s: from the beginning to the end of the last answer. Rates are per second of it,
    tokens of requests that went well.

    latencies: metric -> mean, std, min, max and p50 ... in ms; empty if there was none.
    goodput: requests per second that kept every goal; None if there are no goals.
    late_ms, held_ms: p99 of how much after its time a request's turn came, and of how long
        --max-concurrency then held it back. lag_ms: p99 of how late this process looks.
    cached_token_count: of prompts, None if the server did not say. hit_rate: of input tokens.
    unsent_count: turns that did not leave because one before them failed. turns: of sessions.
    """

    duration_s: float
    request_count: int
    good_count: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    input_token_count: int
    output_token_count: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    mean_concurrency: float
    peak_concurrency: int
    goodput: float | None
    latencies: dict[str, dict[str, float]]
    late_ms: float
    held_ms: float
    lag_ms: float
    warnings: list[str]
    cached_token_count: int | None = None
    hit_rate: float | None = None
    unsent_count: int = 0
    turns: list[TurnSummary] = field(default_factory=list)


def measure(outcome: Outcome) -> Latencies:
    """Latencies of a request that went well."""
    times_s = [at_s for at_s, _ in outcome.arrivals]
    counts = [count for _, count in outcome.arrivals]
    itls: list[float] = []
    for index in range(1, len(times_s)):
        count = counts[index] - counts[index - 1]
        itls += [1e3 * (times_s[index] - times_s[index - 1]) / count] * count
    later_count = counts[-1] - 1
    return Latencies(
        ttft=1e3 * (times_s[0] - outcome.sent_s),
        tpot=1e3 * (times_s[-1] - times_s[0]) / later_count if later_count > 0 else None,
        itls=itls,
        e2el=1e3 * (outcome.ended_s - outcome.sent_s),
    )


def keeps_goals(latencies: Latencies, goals: Mapping[str, float]) -> bool:
    """Whether a request is good: none of its numbers is above its goal, nor any gap between two of
    its tokens above that of itl."""
    found = {
        "ttft": latencies.ttft,
        "tpot": latencies.tpot or 0.0,
        "itl": max(latencies.itls, default=0.0),
        "e2el": latencies.e2el,
    }
    return all(found[metric] <= goal for metric, goal in goals.items())


def summarize(run: Run, percentiles: Sequence[float], goals: Mapping[str, float]) -> Summary:
    good = [outcome for outcome in run.outcomes if outcome.is_good]
    bad = [outcome for outcome in run.outcomes if not outcome.is_good]
    measured = [measure(outcome) for outcome in good]
    samples = {
        "ttft": [one.ttft for one in measured],
        "tpot": [one.tpot for one in measured if one.tpot is not None],
        "itl": [itl for one in measured for itl in one.itls],
        "e2el": [one.e2el for one in measured],
    }
    input_count = sum(outcome.prompt_count or len(outcome.ask.prompt) for outcome in good)
    output_count = sum(outcome.output_count for outcome in good)
    late_ms = _p99_ms([outcome.began_s - outcome.due_s for outcome in run.outcomes])
    held_ms = _p99_ms([outcome.sent_s - outcome.began_s for outcome in run.outcomes])
    lag_ms = _p99_ms(run.lags_s)
    kept_count = sum(keeps_goals(one, goals) for one in measured)
    cached_count = cached_count_of(good)
    steps = concurrency_steps(run.outcomes)
    busy_s = sum(outcome.ended_s - outcome.sent_s for outcome in run.outcomes)
    return Summary(
        duration_s=run.duration_s,
        request_count=len(run.outcomes),
        good_count=len(good),
        errors=dict(Counter(outcome.error_kind for outcome in bad).most_common()),
        error_examples={outcome.error_kind: outcome.error for outcome in reversed(bad)},
        input_token_count=input_count,
        output_token_count=output_count,
        request_throughput=len(good) / run.duration_s,
        input_throughput=input_count / run.duration_s,
        output_throughput=output_count / run.duration_s,
        mean_concurrency=busy_s / run.duration_s,
        peak_concurrency=max((count for _, count in steps), default=0),
        goodput=kept_count / run.duration_s if goals else None,
        latencies={
            metric: describe(values, percentiles) for metric, values in samples.items() if values
        },
        late_ms=late_ms,
        held_ms=held_ms,
        lag_ms=lag_ms,
        warnings=_warnings(late_ms, lag_ms),
        cached_token_count=cached_count,
        hit_rate=None if cached_count is None else cached_count / input_count,
        unsent_count=run.unsent_count,
        turns=summarize_turns(good),
    )


def describe(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Percentiles are numpy's: linear between two samples."""
    array = np.asarray(values)
    return {
        "mean": float(array.mean()),
        "std": float(array.std()),
        "min": float(array.min()),
        **{f"p{rank:g}": float(np.percentile(array, rank)) for rank in percentiles},
        "max": float(array.max()),
    }


def concurrency_steps(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """(time, requests under way from then on), in the order of time."""
    changes = [(outcome.sent_s, 1) for outcome in outcomes]
    changes += [(outcome.ended_s, -1) for outcome in outcomes]
    steps: list[tuple[float, int]] = []
    count = 0
    for at_s, change in sorted(changes):
        count += change
        steps.append((at_s, count))
    return steps


def request_fields(outcome: Outcome) -> dict[str, object]:
    """One request as --save-detailed writes it."""
    fields: dict[str, object] = {
        "index": outcome.ask.index,
        "due_s": outcome.due_s,
        "sent_s": outcome.sent_s,
        "ended_s": outcome.ended_s,
        "turn": None if outcome.ask.turn is None else outcome.ask.turn + 1,
        "prompt_tokens": outcome.prompt_count or len(outcome.ask.prompt),
        "cached_tokens": outcome.cached_count,
        "output_tokens": outcome.output_count,
        "error_kind": outcome.error_kind,
        "error": outcome.error,
    }
    if not outcome.is_good:
        return fields
    one = measure(outcome)
    return fields | {
        "ttft_ms": one.ttft,
        "tpot_ms": one.tpot,
        "itl_ms": one.itls,
        "e2el_ms": one.e2el,
    }


def _p99_ms(seconds: Sequence[float]) -> float:
    return 1e3 * float(np.percentile(seconds, 99)) if seconds else 0.0


def _warnings(late_ms: float, lag_ms: float) -> list[str]:
    warnings: list[str] = []
    if late_ms > LATE_MS_MAX:
        warnings.append(
            f"requests left {late_ms:.0f} ms after their time (p99): this client can't send as "
            "fast as it was asked to; use several of them, or a lower --request-rate"
        )
    if lag_ms > LAG_MS_MAX:
        warnings.append(
            f"this client looks {lag_ms:.0f} ms late (p99), and latencies hold that much of its "
            "own: give it a core of its own, or spread the load over several clients"
        )
    return warnings

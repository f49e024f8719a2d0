"""Gaps between tokens under bursts of long prompts: single server against pair.

A few streams run all the time. In every second round, bursts of long prompts come as well. The gaps
are of the steady streams only, from the first burst on for as long as bursts come and all streams
run; real servers, HTTP, and three ways to use the same two cores:

    pair          a prefill server on core 0, a decode server on core 1
    single        one server on core 1; core 0 has nothing to do but the client
    single_both   one server on both cores, with two threads

The client is on core 0 in each of them, with priority over the other processes there.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import numpy as np

from bench.deployment import VOCAB_SIZE, Deployment, Shape, missing_cores
from bench.report import NotRun, Row, at_least, row_of_medians
from bench.serve.workload import Ask

CASES = {
    "pair": (Shape("pair", 1, 1), ()),
    "single": (Shape("single", 0, 1), ()),
    "single_both": (
        Shape("single_both", 0, 1, decode_cores=frozenset({0, 1})),
        ("--cpu-threads", "2"),
    ),
}
# bf16 has no fast path on many CPUs.
FLAGS = ("--dtype", "float32")
TIMES_LOWER_MIN = 5.0
ROUND_COUNT = 3
STREAM_COUNT = 4
STREAM_PROMPT, STREAM_OUTPUT = 32, 1900
BURST_INTERVAL_S = 0.5
BURST_AT_S = tuple(BURST_INTERVAL_S * number for number in range(1, 8))
BURST_COUNT = 3
BURST_PROMPT, BURST_OUTPUT = 1500, 8


def run() -> list[Row | NotRun]:
    """p99 of the gaps, in ms; the ratio is to the pair's."""
    if missing := missing_cores():
        return [NotRun("itl_p99_single_bursts", missing, str(at_least(TIMES_LOWER_MIN)))]
    p99_ms: dict[tuple[str, bool], list[float]] = {
        (case, has_bursts): [] for case in CASES for has_bursts in (False, True)
    }
    with ExitStack() as stack:
        servers = {
            case: stack.enter_context(Deployment(shape, (*FLAGS, *flags)))
            for case, (shape, flags) in CASES.items()
        }
        for one in servers.values():
            one.send(workload(has_bursts=True)[: STREAM_COUNT + 1])  # warms what all use
        for _ in range(ROUND_COUNT):
            for (case, has_bursts), found in p99_ms.items():
                found.append(measure_p99_ms(servers[case], has_bursts=has_bursts))
    rows: list[Row | NotRun] = []
    for (case, has_bursts), found in p99_ms.items():
        against = p99_ms["pair", has_bursts] if case != "pair" else p99_ms["pair", False]
        reference = "pair" if case != "pair" else "without bursts"
        name = f"itl_p99_{case}_{'bursts' if has_bursts else 'quiet'}"
        if (case, has_bursts) == ("pair", False):
            rows.append(row_of_medians(name, "ms", found))
            continue
        target = at_least(TIMES_LOWER_MIN) if case != "pair" and has_bursts else None
        rows.append(row_of_medians(name, "ms", found, reference, against, target))
    return rows


def workload(*, has_bursts: bool) -> list[Ask]:
    """The steady streams come first."""
    rng = np.random.default_rng(11)

    def ask(index: int, at_s: float, prompt_count: int, output_count: int) -> Ask:
        prompt = rng.integers(0, VOCAB_SIZE, size=prompt_count)
        return Ask(index, at_s, tuple(prompt.tolist()), output_count)

    asks = [ask(index, 0.0, STREAM_PROMPT, STREAM_OUTPUT) for index in range(STREAM_COUNT)]
    for at_s in BURST_AT_S if has_bursts else ():
        for _ in range(BURST_COUNT):
            asks.append(ask(len(asks), at_s, BURST_PROMPT, BURST_OUTPUT))
    return asks


def measure_p99_ms(servers: Deployment, *, has_bursts: bool) -> float:
    """Of the gaps of the steady streams in one run. Raises: RuntimeError if they were too short."""
    outcomes = servers.send(workload(has_bursts=has_bursts)).outcomes
    steady = [outcome for outcome in outcomes if outcome.ask.index < STREAM_COUNT]
    assert len(steady) == STREAM_COUNT
    begin_s = BURST_AT_S[0]
    end_s = min(BURST_AT_S[-1] + BURST_INTERVAL_S, *(outcome.ended_s for outcome in steady))
    if end_s < begin_s + 2 * BURST_INTERVAL_S:
        raise RuntimeError(f"the streams ended after {end_s:.1f} s: too few bursts")
    gaps_ms = [
        1e3 * (at_s - before_s)
        for outcome in steady
        for (before_s, _), (at_s, _) in pairwise(outcome.arrivals)
        if begin_s <= at_s <= end_s
    ]
    return float(np.percentile(gaps_ms, 99))

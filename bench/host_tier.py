"""The tier in host memory, against a pair of servers that lose what their pools have no room for.

    sessions   more of them than the pools hold: all of a prompt but its last tokens was there once.
               TTFT of turns 2 and later
    streams    a few that run all the time, while prompts that share nothing go through the pools:
               every block is saved and none comes back. Gaps between tokens of the streams

One model for each kind of cache. The pairs take turns, and what they answer is not looked at here.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from itertools import pairwise

import httpx
import numpy as np

from bench.report import Row, at_most, row_of_medians
from bench.reuse_models import CONTEXT_LENGTH, MODELS, VOCAB_SIZE, ReuseModel, written
from bench.sending import replay_to, send_to
from bench.serve.outcome import Run
from bench.serve.workload import Ask
from demo.servers import Pair

POOL_TOKENS = 6144
FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--cpu-threads", "1", "--page-size", "16"),
    *("--max-total-tokens", str(POOL_TOKENS), "--context-length", str(CONTEXT_LENGTH)),
    *("--request-history", "4096"),
)
TIER = ("--host-cache-gb", "0.5")

SESSION_ROUNDS = 2
# About 24,000 tokens in the end, four times what a pool holds; two sessions at a time.
SESSION_COUNT, TURN_COUNT = 12, 6
FIRST_PROMPT, NEW_TOKENS, ANSWER = 1500, 56, 24
CONCURRENCY = 2

# A gap of the 99th percentile is one for each prompt that passes, and up to a third longer from
# round to round on two cores.
STREAM_ROUNDS = 20
STREAM_COUNT, STREAM_PROMPT, STREAM_OUTPUT = 3, 32, 400
PASSING_COUNT, PASSING_PROMPT, PASSING_OUTPUT, PASSING_EVERY_S = 16, 1200, 2, 0.3

TTFT_RATIO_MAX = 0.4
ITL_RATIO_MAX = 1.1


def run() -> list[Row]:
    return [row for model in MODELS for row in measure(model)]


def measure(model: ReuseModel) -> list[Row]:
    with ExitStack() as stack:
        path = stack.enter_context(written(model))
        pairs = [
            stack.enter_context(Pair(path, flags, flags)) for flags in ((*FLAGS, *TIER), FLAGS)
        ]
        ttfts: list[list[float]] = [[], []]
        gaps: list[list[float]] = [[], []]
        for number in range(SESSION_ROUNDS):
            for found, pair in zip(ttfts, pairs, strict=True):
                _forget(pair)
                found.append(_ttft_ms(_play(pair, number)))
        for number in range(STREAM_ROUNDS):
            for found, pair in zip(gaps, pairs, strict=True):
                found.append(_gap_p99_ms(send_to([pair.decode.url], _passing(number))))
    without = "without a tier"
    return [
        row_of_medians(
            f"tier_{model.name}_ttft_turns_2_on", "ms", ttfts[0], without, ttfts[1],
            at_most(TTFT_RATIO_MAX),
        ),
        row_of_medians(
            f"tier_{model.name}_itl_p99", "ms", gaps[0], without, gaps[1], at_most(ITL_RATIO_MAX)
        ),
    ]  # fmt: skip


def _forget(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        httpx.post(f"{server.url}/flush_cache", timeout=30.0).raise_for_status()


def _play(pair: Pair, number: int) -> Run:
    return replay_to(
        pair.decode.url,
        *("--num-sessions", str(SESSION_COUNT), "--session-turns", str(TURN_COUNT)),
        *("--random-input-len", str(FIRST_PROMPT), "--session-turn-len", str(NEW_TOKENS)),
        *("--random-output-len", str(ANSWER), "--seed", str(number)),
        *("--max-concurrency", str(CONCURRENCY)),
        vocab_size=VOCAB_SIZE,
    )


def _ttft_ms(played: Run) -> float:
    later = [outcome for outcome in played.outcomes if outcome.ask.turn]
    return statistics.median(1e3 * (one.arrivals[0][0] - one.sent_s) for one in later)


def _passing(number: int) -> list[Ask]:
    """Streams, and prompts that pass by. No two begin alike."""
    rng = np.random.default_rng(number)

    def prompt(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, VOCAB_SIZE, size=count).tolist())

    streams = [Ask(i, 0.0, prompt(STREAM_PROMPT), STREAM_OUTPUT) for i in range(STREAM_COUNT)]
    passing = [
        Ask(STREAM_COUNT + i, PASSING_EVERY_S * (i + 1), prompt(PASSING_PROMPT), PASSING_OUTPUT)
        for i in range(PASSING_COUNT)
    ]
    return streams + passing


def _gap_p99_ms(sent: Run) -> float:
    """Of the streams, from the first prompt that passes on."""
    gaps = [
        1e3 * (after - before)
        for outcome in sent.outcomes
        if outcome.ask.index < STREAM_COUNT
        for (before, _), (after, _) in pairwise(outcome.arrivals)
        if before >= PASSING_EVERY_S
    ]
    return float(np.percentile(gaps, 99))

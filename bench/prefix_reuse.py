"""Prefix reuse on a pair: sessions, equal prompts and random prompts, with it and without.

Two pairs of the same model take turns on this machine, one with its prefix caches and one with
--disable-radix-cache on both servers. One model for each kind of cache: plain keys and values,
windows, latent rows, and recurrent states.

    sessions   8 side by side, 10 turns each: every prompt is all before it, with the server's own
               answers, and 56 new tokens. Of a later prompt about 95 % was there before
    equal      ten equal prompts at once
    random     prompts that share nothing, which pay for the search and gain nothing

Tokens and bytes are counted by the servers and held against the least that was possible: what no
earlier turn of the session had. Times are ratios within one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import numpy as np

from bench.report import Row, at_least, at_most, row_of_medians
from bench.reuse_account import Account, Least, account_since, least_of
from bench.reuse_models import CONTEXT_LENGTH, MODELS, VOCAB_SIZE, ReuseModel, written
from bench.sending import load_settings, replay_to, send_to
from bench.serve.outcome import Run
from bench.serve.summary import summarize
from bench.serve.workload import Ask, make_workload
from demo.servers import Pair

FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--cpu-threads", "1", "--page-size", "16"),
    *("--max-total-tokens", "65536", "--context-length", str(CONTEXT_LENGTH)),
    *("--request-history", "4096"),
)
OFF = ("--disable-radix-cache",)

SESSION_ROUNDS = 2
SESSION_COUNT, TURN_COUNT = 8, 10
FIRST_PROMPT, NEW_TOKENS, ANSWER = 1500, 56, 24

EQUAL_COUNT, EQUAL_PROMPT = 10, 2000

RANDOM_ROUNDS = 16
RANDOM_COUNT, RANDOM_STREAMS, RANDOM_PROMPT, RANDOM_ANSWER = 8, 4, 1000, 8

TTFT_RATIO_MAX = 0.08
RATE_RATIO_MIN = 3.0
COMPUTED_RATIO_MAX = 1.05
MOVED_RATIO_MAX = 1.05
EQUAL_RATIO_MAX = 1.1
RANDOM_LOSS_MAX = 0.02


@dataclass(slots=True)
class Found:
    """The samples of one pair. TTFTs in ms, medians of a round; rates in requests per second."""

    ttfts: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    random_ttfts: list[float] = field(default_factory=list)
    random_rates: list[float] = field(default_factory=list)


def run() -> list[Row]:
    return [row for model in MODELS for row in measure(model)]


def measure(model: ReuseModel) -> list[Row]:
    with ExitStack() as stack:
        path = stack.enter_context(written(model))
        reusing = stack.enter_context(Pair(path, FLAGS, FLAGS, say=_say))
        plain = stack.enter_context(Pair(path, (*FLAGS, *OFF), (*FLAGS, *OFF), say=_say))
        for pair in (reusing, plain):
            _send_random(pair, seed=999)  # warms what all use
        on, off = Found(), Found()
        accounts = [_sessions(model, reusing, plain, on, off, r) for r in range(SESSION_ROUNDS)]
        equal_count = _equal_prompts(reusing)
        for number in range(RANDOM_ROUNDS):
            for pair, found in ((reusing, on), (plain, off)):
                found_run = _send_random(pair, seed=1000 + number)
                found.random_ttfts.append(_ttft_ms(found_run, from_turn=0))
                found.random_rates.append(_rate(found_run))
    return [*_session_rows(model, on, off, accounts), _equal_row(model, equal_count),
            *_random_rows(model, on, off)]  # fmt: skip


def _say(line: str) -> None:
    print(line, flush=True)


# ---- sessions ------------------------------------------------------------------------------------


def _sessions(
    model: ReuseModel, reusing: Pair, plain: Pair, on: Found, off: Found, number: int
) -> tuple[Account, Least]:
    """One round of the same sessions on both pairs; what the reusing pair did for it."""
    for pair, found in ((plain, off), (reusing, on)):
        httpx.post(f"{pair.prefill.url}/flush_cache", timeout=30.0).raise_for_status()
        httpx.post(f"{pair.decode.url}/flush_cache", timeout=30.0).raise_for_status()
        began_wall_s = time.time()
        played = replay_to(
            pair.decode.url,
            *("--num-sessions", str(SESSION_COUNT), "--session-turns", str(TURN_COUNT)),
            *("--random-input-len", str(FIRST_PROMPT), "--session-turn-len", str(NEW_TOKENS)),
            *("--random-output-len", str(ANSWER), "--seed", str(number)),
            vocab_size=VOCAB_SIZE,
        )
        found.ttfts.append(_ttft_ms(played, from_turn=1))
        found.rates.append(_rate(played))
    account = account_since(reusing, began_wall_s, len(played.outcomes))
    return account, least_of(model, played.outcomes)


def _session_rows(
    model: ReuseModel, on: Found, off: Found, accounts: Sequence[tuple[Account, Least]]
) -> list[Row]:
    computed = [float(account.computed_count) for account, _ in accounts]
    moved = [account.moved_nbytes / 1e6 for account, _ in accounts]
    new_tokens = [float(least.token_count) for _, least in accounts]
    new_mb = [least.nbytes / 1e6 for _, least in accounts]
    name = f"reuse_{model.name}"
    return [
        row_of_medians(
            f"{name}_ttft_turns_2_on", "ms", on.ttfts, "without reuse", off.ttfts,
            at_most(TTFT_RATIO_MAX),
        ),
        row_of_medians(
            f"{name}_requests", "req/s", on.rates, "without reuse", off.rates,
            at_least(RATE_RATIO_MIN),
        ),
        row_of_medians(
            f"{name}_computed", "tokens", computed, "new tokens", new_tokens,
            at_most(COMPUTED_RATIO_MAX),
        ),
        row_of_medians(
            f"{name}_moved", "MB", moved, "new to decode", new_mb, at_most(MOVED_RATIO_MAX)
        ),
    ]  # fmt: skip


# ---- equal and random prompts --------------------------------------------------------------------


def _equal_prompts(pair: Pair) -> int:
    """Prompt tokens computed for ten equal prompts."""
    prompt = tuple(np.random.default_rng(7).integers(3, VOCAB_SIZE, size=EQUAL_PROMPT).tolist())
    asks = [Ask(index, 0.0, prompt, RANDOM_ANSWER) for index in range(EQUAL_COUNT)]
    began_wall_s = time.time()
    send_to([pair.decode.url], asks)
    return account_since(pair, began_wall_s, EQUAL_COUNT).computed_count


def _equal_row(model: ReuseModel, computed_count: int) -> Row:
    ratio = computed_count / EQUAL_PROMPT
    name, target = f"reuse_{model.name}_ten_equal", at_most(EQUAL_RATIO_MAX)
    return Row(name, computed_count, "tokens", "one prompt", EQUAL_PROMPT, ratio, target=target)


def _send_random(pair: Pair, seed: int) -> Run:
    flags = (
        *("--num-prompts", str(RANDOM_COUNT), "--seed", str(seed)),
        *("--random-input-len", str(RANDOM_PROMPT), "--random-output-len", str(RANDOM_ANSWER)),
    )
    return send_to(
        [pair.decode.url],
        make_workload(load_settings(*flags), VOCAB_SIZE),
        "--max-concurrency",
        str(RANDOM_STREAMS),
    )


def _random_rows(model: ReuseModel, on: Found, off: Found) -> list[Row]:
    name = f"reuse_{model.name}_random"
    return [
        row_of_medians(
            f"{name}_ttft", "ms", on.random_ttfts, "without reuse", off.random_ttfts,
            at_most(1 + RANDOM_LOSS_MAX),
        ),
        row_of_medians(
            f"{name}_requests", "req/s", on.random_rates, "without reuse", off.random_rates,
            at_least(1 - RANDOM_LOSS_MAX),
        ),
    ]  # fmt: skip


def _ttft_ms(played: Run, from_turn: int) -> float:
    return statistics.median(
        1e3 * (outcome.arrivals[0][0] - outcome.sent_s)
        for outcome in played.outcomes
        if (outcome.ask.turn or 0) >= from_turn
    )


def _rate(played: Run) -> float:
    return summarize(played, (50.0,), {}).request_throughput

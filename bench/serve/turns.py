"""What a run of sessions comes to, turn by turn. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.serve.outcome import Outcome


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """Of the requests that went well and were the n-th of their sessions, n from 1 on.

    prompt_tokens, cached_tokens: means; cached_tokens and hit_rate are None if the server did not
        say. hit_rate: cached over prompt tokens. TTFTs in ms.
    """

    turn: int
    request_count: int
    prompt_tokens: float
    cached_tokens: float | None
    hit_rate: float | None
    ttft_p50: float
    ttft_p99: float


def summarize_turns(good: Sequence[Outcome]) -> list[TurnSummary]:
    """good: outcomes that went well; those outside of sessions are left out."""
    by_turn: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in good:
        if outcome.ask.turn is not None:
            by_turn[outcome.ask.turn].append(outcome)
    return [_summarize(turn, by_turn[turn]) for turn in sorted(by_turn)]


def cached_count_of(good: Sequence[Outcome]) -> int | None:
    """Cached tokens of all prompts; None if the server did not say for each of them."""
    total = 0
    for outcome in good:
        if outcome.cached_count is None:
            return None
        total += outcome.cached_count
    return total if good else None


def _summarize(turn: int, outcomes: Sequence[Outcome]) -> TurnSummary:
    ttfts_ms = [1e3 * (outcome.arrivals[0][0] - outcome.sent_s) for outcome in outcomes]
    count = len(outcomes)
    prompt_count = sum(outcome.prompt_count for outcome in outcomes)
    cached_count = cached_count_of(outcomes)
    return TurnSummary(
        turn=turn + 1,
        request_count=count,
        prompt_tokens=prompt_count / count,
        cached_tokens=None if cached_count is None else cached_count / count,
        hit_rate=None if cached_count is None else cached_count / prompt_count,
        ttft_p50=float(np.percentile(ttfts_ms, 50)),
        ttft_p99=float(np.percentile(ttfts_ms, 99)),
    )

"""Which prompts come when: drawn from a seed, or read from a trace. Sends nothing.

The same settings give the same workload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from bench.serve.noise import block_tokens
from bench.serve.settings import PROMPT_COUNT_DEFAULT, Settings
from bench.serve.traces.read import read_trace
from bench.serve.traces.row import Trace

WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. arrival_s: when it is due, counted from the beginning of the run.

    turn: of its session, from 0 on; None outside of sessions. messages: role and text of those
        before the prompt, where a chat is text.
    """

    index: int
    arrival_s: float
    prompt: tuple[int, ...]
    output_count: int
    turn: int | None = None
    messages: tuple[tuple[str, str], ...] = ()


def make_workload(settings: Settings, vocab_size: int) -> list[Ask]:
    """Requests in the order of their arrivals. Raises: ConfigError for an unusable trace."""
    rng = np.random.default_rng(settings.seed)
    if settings.dataset_name == "trace":
        assert settings.dataset_path is not None, "the settings were checked"
        trace = read_trace(settings.dataset_path, settings.trace_format)
        return _replay(trace, settings, vocab_size, rng)
    count = settings.num_prompts or PROMPT_COUNT_DEFAULT
    assert settings.request_rate is not None, "only of a trace"
    if settings.dataset_name == "shared-prefix":
        drawn = _shared_prefixes(settings, count, vocab_size, rng)
    else:
        drawn = _random_prompts(settings, count, vocab_size, rng)
    arrivals = draw_arrivals(count, settings.request_rate, settings.burstiness, rng)
    return [
        Ask(index, arrival_s, prompt, output_count)
        for index, (arrival_s, (prompt, output_count)) in enumerate(
            zip(arrivals, drawn, strict=True)
        )
    ]


def make_warm_ups(
    settings: Settings, lengths: Sequence[tuple[int, int]], vocab_size: int
) -> list[Ask]:
    """Requests as long as the first ones, of other tokens, so that they warm no prefix.

    lengths: (prompt, output) of the first ones, in tokens.
    """
    rng = np.random.default_rng((settings.seed, WARM_UPS))
    like = [lengths[index % len(lengths)] for index in range(settings.warmup_requests)]
    return [
        Ask(index, 0.0, _tokens(rng, input_length, vocab_size), output_length)
        for index, (input_length, output_length) in enumerate(like)
    ]


def lengths_of(workload: Sequence[Ask]) -> list[tuple[int, int]]:
    return [(len(ask.prompt), ask.output_count) for ask in workload]


def draw_arrivals(count: int, rate: float, burstiness: float, rng: Generator) -> list[float]:
    """Seconds from the first arrival on. The gaps are gamma distributed with a mean of 1 / rate."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def _random_prompts(
    settings: Settings, count: int, vocab_size: int, rng: Generator
) -> list[tuple[tuple[int, ...], int]]:
    inputs = draw_lengths(settings.random_input_len, settings.random_range_ratio, count, rng)
    outputs = draw_lengths(settings.random_output_len, settings.random_range_ratio, count, rng)
    return [(_tokens(rng, n, vocab_size), out) for n, out in zip(inputs, outputs, strict=True)]


def draw_lengths(length: int, ratio: float, count: int, rng: Generator) -> list[int]:
    low = max(1, math.floor(length * ratio))
    drawn: list[int] = rng.integers(low, length + 1, size=count).tolist()
    return drawn


def _shared_prefixes(
    settings: Settings, count: int, vocab_size: int, rng: Generator
) -> list[tuple[tuple[int, ...], int]]:
    """Every prompt is one of the prefixes and a question of its own; they come in random order."""
    prefixes = [
        _tokens(rng, settings.gsp_system_prompt_len, vocab_size)
        for _ in range(settings.gsp_num_groups)
    ]
    groups = rng.permutation(np.arange(count) % settings.gsp_num_groups)
    return [
        (
            prefixes[group] + _tokens(rng, settings.gsp_question_len, vocab_size),
            settings.gsp_output_len,
        )
        for group in groups
    ]


def _replay(trace: Trace, settings: Settings, vocab_size: int, rng: Generator) -> list[Ask]:
    """A hash id always stands for the same tokens; what no id covers is the prompt's own."""
    block_size = settings.trace_block_size or trace.block_size
    rows = trace.rows[: settings.num_prompts]
    asks: list[Ask] = []
    for index, row in enumerate(rows):
        covered = min(row.input_length, len(row.hash_ids) * block_size)
        shared = block_tokens(
            settings.seed, row.scope, row.hash_ids, block_size, (0, covered), vocab_size
        )
        prompt = (*shared, *_tokens(rng, row.input_length - covered, vocab_size))
        arrival_s = (row.timestamp - rows[0].timestamp) / 1e3 * settings.trace_slowdown
        asks.append(Ask(index, arrival_s, prompt, row.output_length))
    return asks


def _tokens(rng: Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab_size, size=count).tolist())

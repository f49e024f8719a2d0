"""Which prompts come when: drawn from a seed, or read from a trace. Sends nothing.

The same settings give the same workload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from bench.serve.settings import PROMPT_COUNT_DEFAULT, Settings
from bench.serve.trace import TraceRow, read_trace

TOKENS_OF_BLOCKS = 1  # keeps the draws of a trace's blocks apart from those of its own prompts
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. arrival_s: when it is due, counted from the beginning of the run."""

    index: int
    arrival_s: float
    prompt: tuple[int, ...]
    output_count: int


def make_workload(settings: Settings, vocab_size: int) -> list[Ask]:
    """Requests in the order of their arrivals. Raises: ConfigError for an unusable trace."""
    rng = np.random.default_rng(settings.seed)
    if settings.dataset_name == "trace":
        assert settings.dataset_path is not None, "the settings were checked"
        rows = read_trace(settings.dataset_path)[: settings.num_prompts]
        return _replay(rows, settings, vocab_size, rng)
    count = settings.num_prompts or PROMPT_COUNT_DEFAULT
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


def make_warm_ups(settings: Settings, workload: Sequence[Ask], vocab_size: int) -> list[Ask]:
    """Requests as long as the first ones, of other tokens, so that they warm no prefix."""
    rng = np.random.default_rng((settings.seed, WARM_UPS))
    like = [workload[index % len(workload)] for index in range(settings.warmup_requests)]
    return [
        Ask(index, 0.0, _tokens(rng, len(ask.prompt), vocab_size), ask.output_count)
        for index, ask in enumerate(like)
    ]


def draw_arrivals(count: int, rate: float, burstiness: float, rng: Generator) -> list[float]:
    """Seconds from the first arrival on. The gaps are gamma distributed with a mean of 1 / rate."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def _random_prompts(
    settings: Settings, count: int, vocab_size: int, rng: Generator
) -> list[tuple[tuple[int, ...], int]]:
    inputs = _lengths(settings.random_input_len, settings.random_range_ratio, count, rng)
    outputs = _lengths(settings.random_output_len, settings.random_range_ratio, count, rng)
    return [(_tokens(rng, n, vocab_size), out) for n, out in zip(inputs, outputs, strict=True)]


def _lengths(length: int, ratio: float, count: int, rng: Generator) -> list[int]:
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


def _replay(
    rows: Sequence[TraceRow], settings: Settings, vocab_size: int, rng: Generator
) -> list[Ask]:
    """A hash id always stands for the same tokens; what no id covers is the prompt's own."""
    blocks: dict[int, tuple[int, ...]] = {}
    asks: list[Ask] = []
    for index, row in enumerate(rows):
        prompt: tuple[int, ...] = ()
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                of_block = np.random.default_rng((settings.seed, TOKENS_OF_BLOCKS, hash_id))
                blocks[hash_id] = _tokens(of_block, settings.trace_block_size, vocab_size)
            prompt += blocks[hash_id]
        prompt = prompt[: row.input_length]
        prompt += _tokens(rng, row.input_length - len(prompt), vocab_size)
        arrival_s = (row.timestamp - rows[0].timestamp) / 1e3 * settings.trace_slowdown
        asks.append(Ask(index, arrival_s, prompt, row.output_length))
    return asks


def _tokens(rng: Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab_size, size=count).tolist())

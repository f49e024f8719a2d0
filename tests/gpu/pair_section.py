"""A prefill and a decode server on one device: the same tokens as one server alone, and how fast.

The model is random: its tokens mean nothing, but greedy ones follow from every byte of the cache,
so a page that was transferred wrongly shows. One request at a time is compared: the kernels are
then given the same shapes on both sides, and must give the same bits.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.model_shapes import ModelShape, write_model
from tests.gpu.report import Section
from tests.gpu.servers import CONCURRENT_COUNT, Running, servers

GREEDY_TOKENS = 64
ITL_TOKENS = 256
TTFT_REPEATS = 5


def check_pair_section(section: Section, device: str, shape: ModelShape) -> None:
    section.figure("model", f"{shape.name}, random weights")
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        model = write_model(Path(directory), shape)
        with servers(model, device, shape, is_pair=False) as alone:
            expected = greedy(alone, shape)
            for length, tokens in expected.items():
                is_full = len(tokens) == GREEDY_TOKENS
                section.check(f"{length} tokens, alone: answered", is_full, f"{len(tokens)} tokens")
            measure(section, "single", alone, shape)
        with servers(model, device, shape, is_pair=True) as pair:
            describe(section, pair)
            for length, tokens in greedy(pair, shape).items():
                is_equal = tokens == expected[length]
                first = first_difference(tokens, expected[length])
                section.check(
                    f"{length} tokens: the pair's answer is the single server's",
                    is_equal,
                    f"differs from token {first} on",
                )
            answer_together(section, pair, shape, expected)
            measure(section, "pair", pair, shape)
            measure_transfer(section, pair, shape)


# Asking -------------------------------------------------------------------------------------------


def prompt_of(length: int, shape: ModelShape, seed: int = 0) -> list[int]:
    """Different tokens for different lengths and seeds; nothing is a prefix of anything."""
    step = 7919 + 2 * seed
    return [
        3 + (length * 31 + seed * 101 + i * step) % (shape.vocab_size - 3) for i in range(length)
    ]


def greedy(running: Running, shape: ModelShape) -> dict[int, list[int]]:
    """Greedy tokens by prompt length, one request at a time."""
    return {
        length: running.generate(prompt_of(length, shape), GREEDY_TOKENS).output_ids
        for length in shape.compared
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def answer_together(
    section: Section, running: Running, shape: ModelShape, expected: dict[int, list[int]]
) -> None:
    """All at once: each must be answered in full. In bf16 a batch may round otherwise, so how many
    are equal to the answers of one at a time is a figure, no check."""
    lengths = [shape.compared[i % len(shape.compared)] for i in range(CONCURRENT_COUNT)]
    with ThreadPoolExecutor(CONCURRENT_COUNT) as threads:
        replies = list(
            threads.map(
                lambda length: running.generate(prompt_of(length, shape), GREEDY_TOKENS), lengths
            )
        )
    counts = [len(reply.output_ids) for reply in replies]
    is_full = all(count == GREEDY_TOKENS for count in counts)
    section.check(f"{CONCURRENT_COUNT} at once: all answered in full", is_full, f"{counts}")
    equal_count = sum(
        reply.output_ids == expected[length] for reply, length in zip(replies, lengths, strict=True)
    )
    section.figure("equal to one at a time", f"{equal_count} of {CONCURRENT_COUNT}")


def measure(section: Section, name: str, running: Running, shape: ModelShape) -> None:
    """Time to the first token by prompt length, and between tokens of one stream; in ms."""
    running.stream_times(prompt_of(33, shape, seed=99), 4)
    for length in shape.timed:
        firsts = [
            running.stream_times(prompt_of(length, shape, seed), 2)[0]
            for seed in range(1, TTFT_REPEATS + 1)
        ]
        section.figure(f"{name}: TTFT p50, {length} tokens, ms", statistics.median(firsts) * 1e3)
    times = running.stream_times(prompt_of(shape.itl_prompt, shape, seed=50), ITL_TOKENS)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    section.figure(f"{name}: ITL p50, 1 stream, ms", statistics.median(gaps) * 1e3)
    section.figure(f"{name}: ITL p99, 1 stream, ms", sorted(gaps)[len(gaps) * 99 // 100] * 1e3)
    per_token = (times[-1] - times[0]) / (ITL_TOKENS - 1)
    section.figure(f"{name}: mean per token, ms", per_token * 1e3)


def measure_transfer(section: Section, running: Running, shape: ModelShape) -> None:
    """What the reply's timeline says of the largest timed prompt."""
    reply = running.generate(prompt_of(shape.timed[-1], shape, seed=70), 2)
    timeline = reply.meta_info.timeline
    section.check("the reply has a timeline", timeline is not None)
    if timeline is not None:
        transfer = timeline.transfer
        section.figure("transfer: bytes", transfer.nbytes)
        section.figure("transfer: runs", transfer.run_count)
        section.figure("transfer: transfer_s", transfer.transfer_s)
        section.figure("timeline: ttft_s", timeline.ttft_s)


def describe(section: Section, running: Running) -> None:
    """Which transports and which attention the servers say they use."""
    info = running.client.get(f"{running.url}/server_info").json()
    section.figure("peers", json.dumps(info.get("peers"))[:400])
    section.figure("workers", json.dumps(info.get("workers", info.get("ranks", "")))[:1200])

"""The cost of one round of the decode scheduler with 256 running requests, and of one event of
either scheduler with 1,000 that wait."""

from __future__ import annotations

import statistics
import time
from collections import deque

import numpy as np

from bench.report import Row, at_most
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.prefix_digests import extend_digests, prefix_seed
from common.protocol.codec import encode_layout
from common.protocol.frontend import Submit
from common.protocol.worker import Step, StepDone, WorkerBeat
from common.request import Bootstrap, SamplingParams
from common.scheduling.events import Effect, FromFrontend, FromWorker, ToWorkers
from common.scheduling.facts import SchedulerLimits, ServerFacts
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler

RUNNING_COUNT = 256
ROUND_COUNT = 400
WARM_UP_COUNT = 50
TARGET_MS = 1.0
NOW = 1.0
# Prompts that wait for pages, all of another one that is held.
QUEUED_COUNT = 1000
QUEUED_TOKENS = 4000
HELD_TOKENS = 8000
PREFILL_PAGE_COUNT = 600
QUEUE_PAGE_COUNT = 150
QUEUE_LIMITS = SchedulerLimits(8192, RUNNING_COUNT, 2 * QUEUED_COUNT)
EVENT_COUNT = 400
EVENT_TARGET_MS = 0.1


def run() -> list[Row]:
    """Rows: `schedule(now)` alone, and the handling of a finished step before it; an event of a
    server whose queue fits nowhere."""
    return [*measure_decode(), measure_held(), measure_queue()]


def measure_held() -> Row:
    """A prefill server, all of whose pages are held for a decode server."""
    core = PrefillScheduler(_facts(PREFILL_PAGE_COUNT), QUEUE_LIMITS)
    core.handle(FromFrontend(_routed(1, HELD_TOKENS)), NOW)
    steps = _sent(core.schedule(NOW))
    while steps:
        core.handle(FromWorker(_finish(steps.pop(0))), NOW)
        steps += _sent(core.schedule(NOW))
    waiting = [_routed(2 + index, QUEUED_TOKENS) for index in range(QUEUED_COUNT)]
    return _measure_events("event_1000_queued", core, waiting, EVENT_TARGET_MS)


def measure_queue() -> Row:
    """A decode server that computes its prompts itself, and the pages of all are taken. Each is
    looked for in its prefix cache, of pages of several digests."""
    core = DecodeScheduler(_facts(QUEUE_PAGE_COUNT, 64), QUEUE_LIMITS, [], is_local=True)
    rng = np.random.default_rng(5)
    waiting = []
    for index in range(QUEUED_COUNT):
        tokens = rng.integers(0, 100_000, QUEUED_TOKENS).tolist()
        sampling = SamplingParams(max_new_tokens=100, seed=index)
        digests = extend_digests(prefix_seed({}), tokens)
        waiting.append(Submit(1 + index, tokens, sampling, 1e6, prefix_digests=digests))
    return _measure_events("event_1000_queued_decode", core, waiting, TARGET_MS)


def _measure_events(
    name: str, core: PrefillScheduler | DecodeScheduler, waiting: list[Submit], target_ms: float
) -> Row:
    """A worker's beat, and the decision after it."""
    for submit in waiting:
        core.handle(FromFrontend(submit), NOW)
    core.schedule(NOW)
    event_ms: list[float] = []
    for index in range(EVENT_COUNT):
        started_at = time.perf_counter()
        core.handle(FromWorker(WorkerBeat(0, index)), NOW)
        core.schedule(NOW)
        event_ms.append(1e3 * (time.perf_counter() - started_at))
    value = statistics.median(event_ms[WARM_UP_COUNT:])
    target = at_most(target_ms)
    return Row(name, value, "ms", samples=len(event_ms) - WARM_UP_COUNT, target=target)


def _routed(index: int, token_count: int) -> Submit:
    """A prompt that is computed before its decode server asks, and shares nothing with others."""
    tokens = [index, *range(1000, 1000 + token_count - 1)]
    sampling = SamplingParams(max_new_tokens=1, seed=index)
    return Submit(index, tokens, sampling, 1e6, Bootstrap("bench", 1, index, "bench"))


def measure_decode() -> list[Row]:
    core = DecodeScheduler(_facts(), SchedulerLimits(8192, RUNNING_COUNT, 1024), [], is_local=True)
    for index in range(RUNNING_COUNT):
        sampling = SamplingParams(max_new_tokens=4000, seed=index)
        submit = Submit(index + 1, list(range(100, 200 + index)), sampling, budget_s=1e6)
        core.handle(FromFrontend(submit), NOW)
    steps = deque(_sent(core.schedule(NOW)))
    handle_ms: list[float] = []
    schedule_ms: list[float] = []
    for _ in range(ROUND_COUNT):
        done = FromWorker(_finish(steps.popleft()))
        started_at = time.perf_counter()
        core.handle(done, NOW)
        handled_at = time.perf_counter()
        effects = core.schedule(NOW)
        ended_at = time.perf_counter()
        steps += _sent(effects)
        handle_ms.append(1e3 * (handled_at - started_at))
        schedule_ms.append(1e3 * (ended_at - handled_at))
    return [
        _row("schedule_256_running", schedule_ms[WARM_UP_COUNT:]),
        _row("handle_step_256_running", handle_ms[WARM_UP_COUNT:]),
    ]


def _row(name: str, values_ms: list[float]) -> Row:
    value = statistics.median(values_ms)
    return Row(name, value, "ms", samples=len(values_ms), target=at_most(TARGET_MS))


def _sent(effects: list[Effect]) -> list[Step]:
    """The steps among these effects."""
    return [
        effect.message
        for effect in effects
        if isinstance(effect, ToWorkers) and isinstance(effect.message, Step)
    ]


def _finish(step: Step) -> StepDone:
    """What a worker would answer to a step."""
    sampled = [chunk.request_id for chunk in step.chunks if chunk.is_last] + step.decode
    return StepDone(step.step_id, sampled, [5000] * len(sampled))


def _facts(page_count: int = 100_000, page_size: int = 16) -> ServerFacts:
    components = gqa_components(layer_count=32, kv_head_count=8, head_dim=128, dtype="bfloat16")
    layout = ServerLayout(components, 1, ((0, 32),), page_size)
    return ServerFacts(
        incarnation="bench",
        layout=layout,
        layout_bytes=encode_layout(layout),
        page_counts=(page_count,),
        fingerprint={},
        sequence_token_max=8192,
        eos_token_ids=frozenset(),
        host_ids=("",),
        pids=(),
    )

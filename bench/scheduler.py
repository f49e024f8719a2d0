"""What one round of the decode scheduler costs with 256 running requests."""

from __future__ import annotations

import statistics
import time
from collections import deque

from bench.report import Row, at_most
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.protocol.codec import encode_layout
from common.protocol.frontend import Submit
from common.protocol.worker import Step, StepDone
from common.request import SamplingParams
from common.scheduling.events import Effect, FromFrontend, FromWorker, ToWorkers
from common.scheduling.facts import SchedulerLimits, ServerFacts
from decode_server.scheduler import DecodeScheduler

RUNNING_COUNT = 256
ROUND_COUNT = 400
WARM_UP_COUNT = 50
TARGET_MS = 1.0
NOW = 1.0


def run() -> list[Row]:
    """Rows: `schedule(now)` alone, and the handling of a finished step before it."""
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


def _facts() -> ServerFacts:
    components = gqa_components(layer_count=32, kv_head_count=8, head_dim=128, dtype="bfloat16")
    layout = ServerLayout(components, 1, ((0, 32),), 16)
    return ServerFacts(
        incarnation="bench",
        layout=layout,
        layout_bytes=encode_layout(layout),
        page_counts=(100_000,),
        fingerprint={},
        sequence_token_max=8192,
        eos_token_ids=frozenset(),
        host_id="",
        pids=(),
    )

"""The engine alone on the device: attention of decoding against a copy, prefill against a matmul.

The runner is driven as a worker drives it, by steps. What the device can do at best is measured in
the same run, so that shares of it mean the same on every card.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.flops import count_flops
from common.clock import SystemClock
from common.engine.kv_pool import DTYPES, KvPool
from common.engine.loader import load_model
from common.engine.model_runner import ModelRunner
from common.engine.models.registry import cache_components
from common.layout.cache_layout import ServerLayout
from common.layout.parallel import split_layers
from common.protocol.worker import NewSequence, PageGrant, PrefillChunk, Step
from common.request import SamplingParams
from tests.gpu.model_shapes import EngineLoad, ModelShape, write_model
from tests.gpu.report import Section

PAGE_SIZE = 16
WARM_UP_STEPS = 5
TIMED_STEPS = 20
REPEATS = 5
COPY_NBYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
MATMUL_SIZE = {"cuda": 8192, "cpu": 256}


def check_engine_section(section: Section, device: torch.device, shape: ModelShape) -> None:
    copy_rate = measure_copy(device)
    section.figure("copy GB/s, read and written", copy_rate / 1e9)
    matmul_rate = measure_matmul(device)
    section.figure("bf16 matmul TFLOP/s", matmul_rate / 1e12)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        engine = Engine(write_model(Path(directory), shape), device, shape.engine)
    section.figure("attention", engine.attention)
    measure_decode(section, engine, shape.engine, copy_rate)
    for length in shape.engine.prompts:
        seconds = engine.prefill_seconds(length)
        rate = count_flops(engine.config, 0, length) / seconds
        section.figure(f"prefill {length}: ms", seconds * 1e3)
        section.figure(f"prefill {length}: model TFLOP/s", rate / 1e12)
        section.figure(f"prefill {length}: of matmul", rate / matmul_rate)


def measure_decode(section: Section, engine: Engine, load: EngineLoad, copy_rate: float) -> None:
    """What longer caches add to a step is what attention takes to read them: all else is equal."""
    seconds: list[float] = []
    for token_count in (load.short_tokens, load.tokens):
        seconds.append(engine.decode_seconds(load.streams, token_count))
        section.figure(f"decode {load.streams} x {token_count}: step, ms", seconds[-1] * 1e3)
    added_nbytes = load.streams * (load.tokens - load.short_tokens) * engine.token_nbytes
    added_s = seconds[1] - seconds[0]
    section.check("longer caches take longer", added_s > 0, f"{added_s * 1e3:.3f} ms")
    if added_s > 0:
        section.figure("decode attention GB/s", added_nbytes / added_s / 1e9)
        section.figure("decode attention, of copy", added_nbytes / added_s / copy_rate)


class Engine:
    """A runner over a pool that holds what a load needs, full of random keys and values."""

    def __init__(self, model_path: Path, device: torch.device, load: EngineLoad) -> None:
        model = load_model(
            model_path, dtype="bfloat16", device=device, load_format="dummy", page_size=PAGE_SIZE
        )
        self.config = model.config
        self.attention = f"{model.attention.name} ({model.attention_reason})"
        layout = ServerLayout(
            components=cache_components(model.config, "auto"),
            tp_size=1,
            stages=split_layers(model.config.layer_count, 1),
            page_size=PAGE_SIZE,
        )
        rank = layout.rank(0, 0)
        self.token_nbytes = rank.groups[0].page_nbytes // PAGE_SIZE
        page_count = max(
            load.streams * pages_of(load.tokens + WARM_UP_STEPS + TIMED_STEPS),
            *(pages_of(length + 1) for length in load.prompts),
        )
        pool = KvPool.allocate(rank, [page_count], device)
        pool.buffers[0].view(DTYPES["bfloat16"]).normal_()
        order = torch.randperm(page_count, generator=torch.Generator().manual_seed(1)) + 1
        self._page_ids: list[int] = order.tolist()
        self._runner = ModelRunner(model, pool, SystemClock())
        self._next_step = 1

    def decode_seconds(self, stream_count: int, token_count: int) -> float:
        """The median step of so many sequences, whose tokens but the last are in the cache."""
        ids = list(range(1, stream_count + 1))
        step_count = WARM_UP_STEPS + TIMED_STEPS
        each = pages_of(token_count + step_count)
        grants = [PageGrant(i, 0, 0, self._page_ids[(i - 1) * each : i * each]) for i in ids]
        self._run(new=[self._new(i, token_count, step_count) for i in ids], grants=grants)
        seconds = [self._run(decode=ids) for _ in range(step_count)][WARM_UP_STEPS:]
        self._run(retired=ids)
        return statistics.median(seconds)

    def prefill_seconds(self, token_count: int) -> float:
        """The median of computing a whole prompt in one chunk, and its first token."""
        return statistics.median([self.prefill_once(token_count) for _ in range(1 + REPEATS)][1:])

    def prefill_once(self, token_count: int) -> float:
        seconds = self._run(
            new=[self._new(1, token_count, 2)],
            grants=[PageGrant(1, 0, 0, self._page_ids[: pages_of(token_count)])],
            chunks=[PrefillChunk(1, 0, token_count, is_last=True)],
        )
        self._run(retired=[1])
        return seconds

    def _new(self, request_id: int, token_count: int, output_count: int) -> NewSequence:
        generator = torch.Generator().manual_seed(request_id)
        tokens = torch.randint(3, self.config.vocab_size, (token_count,), generator=generator)
        sampling = SamplingParams(
            max_new_tokens=output_count, seed=1, temperature=0.0, ignore_eos=True
        )
        return NewSequence(request_id, tokens.tolist(), token_count, sampling)

    def _run(
        self,
        *,
        new: list[NewSequence] | None = None,
        grants: list[PageGrant] | None = None,
        chunks: list[PrefillChunk] | None = None,
        decode: list[int] | None = None,
        retired: list[int] | None = None,
    ) -> float:
        """Seconds of one step. Raises: RuntimeError if a sequence failed in it."""
        step = Step(
            step_id=self._next_step,
            new=new or [],
            grants=grants or [],
            chunks=chunks or [],
            decode=decode or [],
            retired=retired or [],
        )
        self._next_step += 1
        started_at = time.perf_counter()
        done = self._runner.run(step)
        seconds = time.perf_counter() - started_at
        if done.failed:
            raise RuntimeError(f"a sequence failed: {next(iter(done.failed.values()))}")
        return seconds


def pages_of(token_count: int) -> int:
    return -(-token_count // PAGE_SIZE)


# What the device can do ---------------------------------------------------------------------------


def measure_copy(device: torch.device) -> float:
    """Bytes per second, read and written, of one tensor to another."""
    nbytes = COPY_NBYTES[device.type]
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / seconds_of(lambda: target.copy_(source), device)


def measure_matmul(device: torch.device) -> float:
    """Operations per second of a large product of random numbers."""
    size = MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, right), device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The median time of one call, of rounds of calls that follow each other."""
    seconds: list[float] = []
    for _ in range(1 + REPEATS):
        synchronize(device)
        started_at = time.perf_counter()
        for _ in range(REPEATS):
            run()
        synchronize(device)
        seconds.append((time.perf_counter() - started_at) / REPEATS)
    return statistics.median(seconds[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

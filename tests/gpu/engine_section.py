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
from common.config import Role, ServerConfig
from common.engine.attention.choose import choose_attention
from common.engine.cache.kv_pool import DTYPES, KvPool
from common.engine.distributed import ParallelContext
from common.engine.kernel_trial import give_memory_back
from common.engine.loader import attention_shape, load_model, read_served_config
from common.engine.model_runner import ModelRunner
from common.engine.models.registry import cache_components
from common.engine.pending_step import PendingStep
from common.layout.cache_layout import ServerLayout
from common.layout.parallel import split_layers
from common.protocol.worker import NewSequence, PageGrant, PrefillChunk, Step
from common.request import SamplingParams
from common.worker.start_graphs import plan_graphs, start_graphs
from tests.gpu.model_shapes import EngineLoad, ModelShape, write_model
from tests.gpu.report import Section

PAGE_SIZE = 16
WARM_UP_STEPS = 5
TIMED_STEPS = 20
REPEATS = 5
COPY_NBYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
MATMUL_SIZE = {"cuda": 8192, "cpu": 256}
RECORDED_SLACK_NBYTES = 32 << 20
"""What torch's blocks may round up one way and not the other."""


def check_engine_section(section: Section, device: torch.device, shape: ModelShape) -> None:
    copy_rate = measure_copy(device)
    section.figure("copy GB/s, read and written", copy_rate / 1e9)
    matmul_rate = measure_matmul(device)
    section.figure("bf16 matmul TFLOP/s", matmul_rate / 1e12)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        engine = Engine(write_model(Path(directory), shape), device, shape.engine)
    section.figure("attention", engine.attention)
    section.figure("recorded decode passes", engine.recorded)
    if engine.planned_nbytes:
        section.figure("recordings, MiB", engine.recorded_nbytes / (1 << 20))
        section.check(
            "recordings take the memory that was set aside for them",
            engine.recorded_nbytes <= engine.planned_nbytes + RECORDED_SLACK_NBYTES,
            f"{engine.recorded_nbytes} bytes, set aside: {engine.planned_nbytes}",
        )
    measure_decode(section, engine, shape.engine, copy_rate)
    longest = max(shape.engine.prompts)
    for length, chunk in (*((n, n) for n in shape.engine.prompts), (longest, shape.engine.chunk)):
        name = f"prefill {length}" + (f" in chunks of {chunk}" if chunk < length else "")
        seconds = engine.prefill_seconds(length, chunk)
        rate = count_flops(engine.config, 0, length) / seconds
        section.figure(f"{name}: ms", seconds * 1e3)
        section.figure(f"{name}: model TFLOP/s", rate / 1e12)
        section.figure(f"{name}: of matmul", rate / matmul_rate)


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
        config = read_served_config(model_path, dtype="bfloat16")
        choice = choose_attention(attention_shape(config, ParallelContext(), device, PAGE_SIZE))
        model = load_model(
            model_path,
            dtype="bfloat16",
            device=device,
            load_format="dummy",
            page_size=PAGE_SIZE,
            attention=choice.attention,
        )
        self.config = model.config
        self.attention = f"{choice.attention.name} ({choice.reason})"
        layout = ServerLayout(
            components=cache_components(model.config, "auto"),
            tp_size=1,
            stages=split_layers(model.config.layer_count, 1),
            page_size=PAGE_SIZE,
        )
        rank = layout.rank(0, 0)
        self.token_nbytes = rank.groups[0].page_nbytes // PAGE_SIZE
        token_max = load.tokens + WARM_UP_STEPS + TIMED_STEPS
        page_count = max(
            load.streams * pages_of(token_max), *(pages_of(length + 1) for length in load.prompts)
        )
        pool = KvPool.allocate(rank, [page_count], device)
        pool.buffers[0].view(DTYPES["bfloat16"]).normal_()
        order = torch.randperm(page_count, generator=torch.Generator().manual_seed(1)) + 1
        self._page_ids: list[int] = order.tolist()
        flags = ServerConfig(
            role=Role.DECODE,
            model_path=str(model_path),
            tokenizer_path="",
            served_model_name="",
            port=1,
            device=device.type,
            cuda_graph_max_bs=load.streams,
        )
        plan = plan_graphs(flags, model, rank, choice, token_max)
        reserved_nbytes = reserved(device)
        graphs, plan = start_graphs(plan, model, pool, choice, token_max)
        self.recorded, self.planned_nbytes = plan.summary, plan.nbytes
        self.recorded_nbytes = reserved(device) - reserved_nbytes
        self._runner = ModelRunner(model, pool, SystemClock(), graphs=graphs)
        self._step_id = 0

    def decode_seconds(self, stream_count: int, token_count: int) -> float:
        """The median step of so many sequences, whose tokens but the last are in the cache.

        As in a worker, a step is launched before the one in front of it is finished.
        """
        ids = list(range(1, stream_count + 1))
        step_count = WARM_UP_STEPS + TIMED_STEPS
        each = pages_of(token_count + step_count)
        grants = [PageGrant(i, 0, 0, self._page_ids[(i - 1) * each : i * each]) for i in ids]
        new = [self._new(i, token_count, step_count) for i in ids]
        pending = self._runner.launch(Step(self._next(), new=new, grants=grants, decode=ids))
        seconds: list[float] = []
        for _ in range(step_count - 1):
            started_at = time.perf_counter()
            following = self._runner.launch(Step(self._next(), decode=ids))
            finish(pending)
            pending = following
            seconds.append(time.perf_counter() - started_at)
        finish(pending)
        finish(self._runner.launch(Step(self._next(), retired=ids)))
        return statistics.median(seconds[WARM_UP_STEPS:])

    def prefill_seconds(self, token_count: int, chunk_size: int) -> float:
        """The median of computing a whole prompt, and its first token."""
        rounds = [self.prefill_once(token_count, chunk_size) for _ in range(1 + REPEATS)]
        return statistics.median(rounds[1:])

    def prefill_once(self, token_count: int, chunk_size: int) -> float:
        new = [self._new(1, token_count, 2)]
        grants = [PageGrant(1, 0, 0, self._page_ids[: pages_of(token_count)])]
        started_at = time.perf_counter()
        pending: list[PendingStep] = []
        for start in range(0, token_count, chunk_size):
            stop = min(start + chunk_size, token_count)
            chunk = PrefillChunk(1, start, stop, is_last=stop == token_count)
            pending.append(
                self._runner.launch(Step(self._next(), new=new, grants=grants, chunks=[chunk]))
            )
            new, grants = [], []
        for step in pending:
            finish(step)
        seconds = time.perf_counter() - started_at
        finish(self._runner.launch(Step(self._next(), retired=[1])))
        return seconds

    def _new(self, request_id: int, token_count: int, output_count: int) -> NewSequence:
        generator = torch.Generator().manual_seed(request_id)
        tokens = torch.randint(3, self.config.vocab_size, (token_count,), generator=generator)
        sampling = SamplingParams(
            max_new_tokens=output_count, seed=1, temperature=0.0, ignore_eos=True
        )
        return NewSequence(request_id, tokens.tolist(), token_count, sampling)

    def _next(self) -> int:
        self._step_id += 1
        return self._step_id


def finish(step: PendingStep) -> None:
    """Raises: RuntimeError if a sequence failed in it."""
    if failed := step.finish().failed:
        raise RuntimeError(f"a sequence failed: {next(iter(failed.values()))}")


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


def reserved(device: torch.device) -> int:
    """Bytes that torch holds of the device and something uses."""
    give_memory_back(device)
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

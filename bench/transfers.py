"""Transfer bandwidth: 64 MiB of random page runs between the pools of two processes.

Measured from Python, from `submit` to the settled event, in GB/s (10^9 bytes). The reference of the
shared-memory rows is a native memcpy of the same runs between two segments of this process; that of
the tcp rows is UCX's own ucx_perftest at the same message size. Everything that is compared is
sampled in turns within one run, because the speed of a shared machine drifts by the minute. Over
tcp each engine makes an untimed transfer before a timed one, as ucx_perftest does: a socket that
has idled starts slowly.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from bench.report import NotRun, Row, at_least, row_of_medians
from bench.transfer_peers import (
    Contender,
    ContenderFailed,
    default_nixl_pair,
    mooncake_pair,
    nixl_pair,
    perftest_gbps,
)
from common.planner.copy_plan import CopyPlan
from common.transport.copies import copy_runs
from common.transport.stream import StreamSettings, StreamTransport
from common.transport.transport import (
    ConnectionMade,
    TargetDescriptor,
    TransferSettled,
    Transport,
)
from common.transport.ucx import UcxSettings, UcxTransport

POOL_NBYTES = 512 << 20
BATCH_NBYTES = 64 << 20
RUN_KIB = (4, 16, 64, 256)
SAMPLE_COUNT = 9
# What a transfer has to reach of a memcpy by KiB of a run, and of ucx_perftest.
MEMCPY_RATIO_MIN = {4: 0.8, 16: 0.8, 64: 0.95, 256: 0.95}
PERFTEST_RATIO_MIN = 0.6
# And of what others reach with the same runs.
CONTENDERS: dict[str, Callable[[str, int], Contender]] = {
    "NIXL": nixl_pair,
    "NIXL default": default_nixl_pair,
    "Mooncake": mooncake_pair,
}
RATIO_MIN = {
    "shm": {"NIXL": 1.0, "NIXL default": 2.0, "Mooncake": 3.0},
    "tcp": {"NIXL": 1.0, "NIXL default": 1.0, "Mooncake": 1.0},
}
PATIENCE_S = 60.0

Samples = dict[str, list[float]]


class Pair:
    """This process as the writer, a child as the target, with our transport between them."""

    def __init__(self, tls: str) -> None:
        """tls: as of `open_transport`."""
        self.transport = open_transport(tls)
        self.source = self._allocate("source")
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(target=serve_target, args=(tls, pipe), daemon=True)
        self._process.start()
        descriptor: TargetDescriptor = self._pipe.recv()
        self.transport.connect("target", descriptor)
        self.transport.wait(PATIENCE_S)
        (event,) = self.transport.poll()
        assert isinstance(event, ConnectionMade), event
        self._tag = 0

    def _allocate(self, name: str) -> np.ndarray:
        view = self.transport.allocate(name, POOL_NBYTES).view
        assert view is not None
        view[:] = np.random.default_rng(0).integers(0, 256, POOL_NBYTES, dtype=np.uint8)
        return view

    def allocate_reference(self) -> np.ndarray:
        return self._allocate("reference")

    def sample(self, plan: CopyPlan) -> float:
        self._tag += 1
        start = time.perf_counter()
        self.transport.submit("target", plan, self._tag)
        self.transport.wait(PATIENCE_S)
        (event,) = self.transport.poll()
        seconds = time.perf_counter() - start
        assert isinstance(event, TransferSettled), event
        assert event.error is None, event
        return plan.total_nbytes / seconds / 1e9

    def cpu_seconds(self) -> tuple[float, float]:
        """That this process and the target's have computed since they were started."""
        self._pipe.send("cpu")
        return time.process_time(), self._pipe.recv()

    def close(self) -> None:
        self.transport.close()
        self._pipe.send(None)
        self._process.join()


def serve_target(tls: str, pipe: Connection) -> None:
    transport = open_transport(tls)
    view = transport.allocate("pool", POOL_NBYTES).view
    assert view is not None
    view[:] = 0
    pipe.send(transport.open_target("writer"))
    while pipe.recv() is not None:
        pipe.send(time.process_time())
    transport.close()


def open_transport(tls: str) -> Transport:
    """tls: UCX's transports, or "stream" or "stream-tls"."""
    if tls.startswith("stream"):
        return StreamTransport(StreamSettings(is_encrypted=tls == "stream-tls"))
    return UcxTransport(UcxSettings(tls=tls))


def plan_random_runs(rng: np.random.Generator, run_nbytes: int) -> CopyPlan:
    """Random pages of the source pool to other random pages of the target pool."""
    run_count = BATCH_NBYTES // run_nbytes
    slots = POOL_NBYTES // run_nbytes
    zeros = np.zeros(run_count, dtype=np.int64)
    return CopyPlan(
        source_region=zeros,
        source_offset=rng.permutation(slots)[:run_count].astype(np.int64) * run_nbytes,
        target_region=zeros,
        target_offset=rng.permutation(slots)[:run_count].astype(np.int64) * run_nbytes,
        nbytes=np.full(run_count, run_nbytes, dtype=np.int64),
    )


def sample_memcpy(target: np.ndarray, source: np.ndarray, plan: CopyPlan) -> float:
    start = time.perf_counter()
    copy_runs(target, source, plan.target_offset, plan.source_offset, plan.nbytes)
    return plan.total_nbytes / (time.perf_counter() - start) / 1e9


def run() -> list[Row | NotRun]:
    return run_shared_memory() + run_tcp()


def run_shared_memory() -> list[Row | NotRun]:
    pair = Pair("posix")
    reference = pair.allocate_reference()
    ours: Samples = defaultdict(list)
    memcpy: Samples = defaultdict(list)
    with Contenders("shm") as contenders:
        rng = np.random.default_rng(1)
        for _ in range(SAMPLE_COUNT):
            for kib in RUN_KIB:
                name = f"transfer_shm_{kib}KiB"
                plan = plan_random_runs(rng, kib << 10)
                memcpy[name].append(sample_memcpy(reference, pair.source, plan))
                ours[name].append(pair.sample(plan))
                contenders.sample(name, plan)
    pair.close()
    rows = [
        row_of_medians(n, "GB/s", ours[n], "memcpy", memcpy[n], at_least(MEMCPY_RATIO_MIN[kib]))
        for n, kib in zip(ours, RUN_KIB, strict=True)
    ]
    return [*rows, *contenders.results(ours)]


def run_tcp() -> list[Row | NotRun]:
    pair = Pair("tcp")
    library_directory = str(pair.transport.describe()["ucx_directory"])
    ours: Samples = defaultdict(list)
    perftest: Samples = defaultdict(list)
    with Contenders("tcp") as contenders:
        rng = np.random.default_rng(2)
        for _ in range(SAMPLE_COUNT):
            for kib in RUN_KIB:
                name = f"transfer_tcp_{kib}KiB"
                warmup, plan = (plan_random_runs(rng, kib << 10) for _ in range(2))
                pair.sample(warmup)
                ours[name].append(pair.sample(plan))
                contenders.sample(name, plan, warmup)
                perftest[name].append(perftest_gbps(library_directory, kib << 10))
    pair.close()
    target = at_least(PERFTEST_RATIO_MIN)
    rows = [row_of_medians(n, "GB/s", ours[n], "ucx_perftest", perftest[n], target) for n in ours]
    return [*rows, *contenders.results(ours)]


class Contenders:
    """The other transfer engines that are installed, sampled beside ours on the same plans.

    One that fails is left out from there on, and is reported as not run.
    """

    def __init__(self, link: str) -> None:
        self._link = link
        self._contenders: dict[str, Contender] = {}
        self._samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._failures: dict[str, str] = {}
        for name, maker in CONTENDERS.items():
            try:
                self._contenders[name] = maker(link, POOL_NBYTES)
            except ContenderFailed as exc:
                self._failures[name] = str(exc)

    def __enter__(self) -> Contenders:
        return self

    def __exit__(self, *exc: object) -> None:
        for contender in self._contenders.values():
            contender.close()

    def sample(self, row: str, plan: CopyPlan, warmup: CopyPlan | None = None) -> None:
        for name, contender in list(self._contenders.items()):
            try:
                if warmup is not None:
                    contender.sample(warmup)
                self._samples[row, name].append(contender.sample(plan))
            except ContenderFailed as exc:
                self._failures[name] = str(exc)
                self._contenders.pop(name).close()

    def results(self, ours: Samples) -> list[Row | NotRun]:
        """Rows of ours held against theirs."""
        rows = [
            row_of_medians(
                f"{row}_over_{name.lower().replace(' ', '_')}",
                *("GB/s", ours[row], name, samples),
                target=at_least(RATIO_MIN[self._link][name]),
            )
            for (row, name), samples in self._samples.items()
            if name not in self._failures
        ]
        missing = [
            NotRun(
                f"transfer_{self._link}_*_over_{name.lower().replace(' ', '_')}",
                reason,
                f"{at_least(RATIO_MIN[self._link][name])} of {name}",
            )
            for name, reason in self._failures.items()
        ]
        return [*rows, *missing]

"""The test's own transport beside a servant's, plans between them, and what a plan must do."""

from __future__ import annotations

import itertools

import numpy as np

from common.planner.copy_plan import CopyPlan
from common.transport.transport import ConnectionMade
from tests.transport.transport_servant import Remote, Writer

REGION_NBYTES = 2 << 20
GUARD_NBYTES = 64 << 10
TARGET_REGIONS = ("pool", "tail")
unique = itertools.count(1)


class Pair:
    """The test's own transport writing into a servant's two regions."""

    def __init__(self, tls: str) -> None:
        self.writer = Writer(tls)
        self.transport = self.writer.transport
        self.sources = [
            self.allocate("source", REGION_NBYTES),
            self.allocate("small", GUARD_NBYTES),
        ]
        self.remote = start_remote(tls)

    def allocate(self, name: str, nbytes: int) -> np.ndarray:
        view = self.transport.allocate(name, nbytes).view
        assert view is not None
        view[:] = np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)
        return view

    def connect(self, remote: Remote | None = None) -> str:
        """A fresh connection to a fresh target; its name on both sides."""
        peer = f"peer{next(unique)}"
        descriptor = (remote or self.remote).open_target(peer, list(TARGET_REGIONS))
        event = self.writer.connect(peer, descriptor)
        assert isinstance(event, ConnectionMade), event
        return peer

    def fill(self, value: int) -> None:
        for name in TARGET_REGIONS:
            self.remote.call("fill", name, value)

    def close(self) -> None:
        self.transport.close()
        self.remote.exit()


def is_mapped(tls: str) -> bool:
    """Whether puts between processes of this host are stores into shared memory."""
    return tls == "auto" or "posix" in tls


def start_remote(tls: str) -> Remote:
    remote = Remote(tls)
    remote.call("allocate", "pool", REGION_NBYTES)
    remote.call("allocate", "tail", GUARD_NBYTES)
    return remote


def plan_of(*runs: tuple[int, int, int, int, int]) -> CopyPlan:
    """Runs of (source region, source offset, target region, target offset, nbytes)."""
    columns = np.array(runs, dtype=np.int64).reshape(-1, 5).T
    return CopyPlan(*(np.ascontiguousarray(column) for column in columns))


def plan_random(seed: int) -> CopyPlan:
    """Runs of every size and alignment, disjoint at the target, sources overlapping at will."""
    rng = np.random.default_rng(seed)
    runs: list[tuple[int, int, int, int, int]] = []
    for target, target_nbytes in enumerate((REGION_NBYTES, GUARD_NBYTES)):
        offset = int(rng.integers(0, 100))
        while True:
            nbytes = int(rng.choice([0, 1, 7, 64, 511, 4096, 4097, 20_000, 33_333]))
            if offset + nbytes > target_nbytes:
                break
            source = int(rng.integers(0, 2))
            source_nbytes = (REGION_NBYTES, GUARD_NBYTES)[source]
            runs.append(
                (source, int(rng.integers(0, source_nbytes - nbytes + 1)), target, offset, nbytes)
            )
            offset += nbytes + int(rng.choice([0, 1, 3, 100, 5000]))
    order = rng.permutation(len(runs))
    return plan_of(*(runs[index] for index in order))


def plan_volume(nbytes: int, run_nbytes: int = 32 << 10) -> CopyPlan:
    """Much traffic: the whole source onto the whole pool, again and again."""
    slots = np.arange(nbytes // run_nbytes, dtype=np.int64) % (REGION_NBYTES // run_nbytes)
    zeros = np.zeros(len(slots), dtype=np.int64)
    sizes = np.full(len(slots), run_nbytes, dtype=np.int64)
    return CopyPlan(zeros, slots * run_nbytes, zeros, slots * run_nbytes, sizes)


def apply_plan(plan: CopyPlan, sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
    """The slow oracle."""
    rows = zip(
        plan.source_region.tolist(),
        plan.source_offset.tolist(),
        plan.target_region.tolist(),
        plan.target_offset.tolist(),
        plan.nbytes.tolist(),
        strict=True,
    )
    for source, source_offset, target, target_offset, nbytes in rows:
        run = sources[source][source_offset : source_offset + nbytes]
        targets[target][target_offset : target_offset + nbytes] = run

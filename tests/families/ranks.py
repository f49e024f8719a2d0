"""The ranks of one server as threads of one process, which say to each other what processes would.

Costs no start of a process, so that every family can meet every layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import TypeVar

import torch
from torch import Tensor

from common.engine.distributed import ParallelContext

T = TypeVar("T")

TIMEOUT_S = 120.0


@dataclass
class Meeting:
    """Where the ranks of a server meet. Any rank that fails wakes the others."""

    tp_size: int
    pp_size: int
    barriers: list[threading.Barrier] = field(init=False)
    parts: list[list[Tensor | None]] = field(init=False)
    pipes: dict[tuple[int, int], Queue[Tensor]] = field(init=False)
    all_ranks: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barriers = [threading.Barrier(self.tp_size) for _ in range(self.pp_size)]
        self.all_ranks = threading.Barrier(self.tp_size * self.pp_size)
        self.parts = [[None] * self.tp_size for _ in range(self.pp_size)]
        self.pipes = {
            (stage, rank): Queue() for stage in range(self.pp_size) for rank in range(self.tp_size)
        }

    def gather(self, stage: int, rank: int, part: Tensor) -> list[Tensor]:
        """What every rank of a stage brought, in rank order; the same list for all of them."""
        self.parts[stage][rank] = part.clone()
        self.barriers[stage].wait(TIMEOUT_S)
        parts = [part for part in self.parts[stage] if part is not None]
        self.barriers[stage].wait(TIMEOUT_S)
        return parts

    def abort(self) -> None:
        for barrier in (*self.barriers, self.all_ranks):
            barrier.abort()


@dataclass(frozen=True, slots=True)
class ThreadContext(ParallelContext):
    """`ParallelContext` of a rank that is a thread."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1, 1))

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self.tp_size == 1:
            return partial
        parts = self.meeting.gather(self.pp_rank, self.tp_rank, partial)
        return torch.stack(parts).sum(0)

    def wait_for_ranks(self, device: torch.device) -> None:
        self.meeting.all_ranks.wait(TIMEOUT_S)

    def gather_last_dim(self, part: Tensor) -> Tensor:
        if self.tp_size == 1:
            return part
        return torch.cat(self.meeting.gather(self.pp_rank, self.tp_rank, part), dim=-1)

    def send_to_next_stage(self, hidden: Tensor) -> None:
        assert not self.is_last_stage
        self.meeting.pipes[self.pp_rank + 1, self.tp_rank].put(hidden.clone())

    def receive_from_previous_stage(self, hidden: Tensor) -> Tensor:
        assert not self.is_first_stage
        received = self.meeting.pipes[self.pp_rank, self.tp_rank].get(timeout=TIMEOUT_S)
        assert (received.shape, received.dtype) == (hidden.shape, hidden.dtype)
        return received


def contexts(tp_size: int, pp_size: int) -> list[ThreadContext]:
    """One per rank, in the order of `RankLayout.index`."""
    meeting = Meeting(tp_size, pp_size)
    return [
        ThreadContext(tp_rank, tp_size, pp_rank, pp_size, None, meeting)
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


class Crew:
    """A thread per rank. The caller waits until all have done their part."""

    def __init__(self, ranks: Sequence[ThreadContext]) -> None:
        self._meeting = ranks[0].meeting
        self._threads = ThreadPoolExecutor(len(ranks)) if len(ranks) > 1 else None
        self._count = len(ranks)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What `work` returns for every rank; raises what the first rank to fail raised."""
        if self._threads is None:
            return [work(0)]
        futures = [self._threads.submit(self._guarded, work, rank) for rank in range(self._count)]
        errors = [error for f in futures if (error := f.exception()) is not None]
        causes = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        for error in causes or errors:
            raise error
        return [future.result() for future in futures]

    def _guarded(self, work: Callable[[int], T], rank: int) -> T:
        try:
            return work(rank)
        except BaseException:
            self._meeting.abort()
            raise

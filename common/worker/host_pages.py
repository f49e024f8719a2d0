"""The tier in host memory of one rank: its pages, their digests, and the copies to and from a pool.

    pool           [page 0][page 1][page 2][page 3] ...     one buffer per page group
                              │       ▲        spill: pool to host, load: host to pool
                              ▼       │
    host memory    [page 0][page 1][page 2] ...             pages of the same size, other ids

Both sides count pages from 1; page 0 is never moved. Moves run in order, on a thread beside the
engine. No event orders them against its steps; the scheduler does:
- The pages of a spill were written by steps that have returned. Nobody writes them before its
  PagesMoved.
- The targets of a load belong to nobody else. No step or transfer reads them before its PagesMoved.

A page may lie in host memory for hours. Its digest shows whether it has changed meanwhile. Knows
nothing of prefixes, nor of why a page moves.
"""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from common.config import ServerConfig
from common.engine.cache.kv_pool import KvPool
from common.errors import NotNow
from common.planner.copy_plan import Int64Array
from common.protocol.worker import MovePages, PageCopies, PagesMoved
from common.transport.copies import Digests, copy_runs, digest_pages, save_pages
from common.worker.host_page_counts import GIB, check_host_memory, decide_host_page_counts
from common.worker.start_device import enough_memory

PageMoves = SimpleQueue[MovePages | None]
"""From the I/O thread; None ends it. Every move holds pages of the pool, so there are never more
moves than pages."""

Runs = tuple[Int64Array, Int64Array, Int64Array]
"""Target offsets, source offsets and sizes, in bytes."""

LESS_HOST_MEMORY = "lower --host-cache-gb"

# On a CPU what leaves a pool goes in pieces, and after each nothing goes for so many times as long
# as it took: the engine's threads are on the same cores, and streams wait for them.
PIECE_NBYTES = 512 << 10
PAUSE_RATIO = 2.0


class HostPages:
    """Owner of a rank's tier in host memory.

    page_counts: per page group, without page 0; [] without a tier.
    buffers: per page group uint8[(page count + 1) * page_nbytes], as those of the pool.
    """

    def __init__(self, pool: KvPool, page_counts: list[int]) -> None:
        """Raises: NotNow if there is no memory for the pages."""
        self.page_counts = page_counts
        self._pool = pool
        self._groups = pool.layout.groups
        sizes = KvPool.buffer_nbytes(pool.layout, page_counts) if page_counts else []
        device = pool.buffers[0].device
        memory = _allocate(sum(sizes), is_pinned=device.type == "cuda")
        self.nbytes = len(memory)
        self.buffers = torch.split(memory, sizes) if sizes else ()
        # Per group uint64[page], page 0 included; none where a page has no bytes.
        self._digests = [
            np.zeros(count + 1 if group.page_nbytes else 0, dtype=np.uint64)
            for count, group in zip(page_counts, self._groups[: len(page_counts)], strict=True)
        ]
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )

    def describe(self) -> str:
        """For people: the rank's bytes, and its pages per group."""
        if not self.page_counts:
            return "none"
        return f"{self.nbytes / GIB:.3g} GiB: {', '.join(map(str, self.page_counts))} pages"

    @torch.inference_mode()
    def run(self, move: MovePages) -> PagesMoved:
        """Copy the pages of a move. A load of pages that have changed copies nothing, and is
        answered with an error.

        Bugs are asserted: pages that a side does not have, and two copies into one page.
        """
        rank = self._pool.layout.index
        # A group without layers on this rank has no bytes to move.
        moved = [c for c in move.pages if c.target_ids and self._groups[c.group].page_nbytes]
        for copies in moved:
            self._check(copies, is_spill=move.is_spill)
        if not move.is_spill:
            for copies in moved:
                if error := self._find_change(copies):
                    return PagesMoved(move.move_id, rank, error)
        if move.is_spill:
            self._spill(moved)
        else:
            self._copy(moved, is_spill=False)
        return PagesMoved(move.move_id, rank)

    def _spill(self, moved: list[PageCopies]) -> None:
        """On a CPU each page is digested where it is copied; else once all have arrived."""
        if self._stream is not None:
            self._copy(moved, is_spill=True)
        for copies in moved:
            if self._stream is not None:
                found = self._digest_pages(copies.group, copies.target_ids)
            else:
                found = self._save(copies)
            self._digests[copies.group][copies.target_ids] = found

    def _save(self, copies: PageCopies) -> Digests:
        return save_pages(
            self.buffers[copies.group].numpy(),
            self._pool.buffers[copies.group].numpy(),
            np.array(copies.target_ids, dtype=np.int64),
            np.array(copies.source_ids, dtype=np.int64),
            self._groups[copies.group].page_nbytes,
            piece_nbytes=PIECE_NBYTES,
            pause_ratio=PAUSE_RATIO,
        )

    def _check(self, copies: PageCopies, *, is_spill: bool) -> None:
        assert self.page_counts, "pages move only where there is a tier"
        page_maxima = self._pool.page_counts[copies.group], self.page_counts[copies.group]
        source_max, target_max = page_maxima if is_spill else reversed(page_maxima)
        assert len(copies.source_ids) == len(copies.target_ids), copies
        assert all(1 <= page <= source_max for page in copies.source_ids), copies
        assert all(1 <= page <= target_max for page in copies.target_ids), copies
        assert len(set(copies.target_ids)) == len(copies.target_ids), copies

    def _find_change(self, copies: PageCopies) -> str:
        """An error that names the first page whose bytes are not those that were spilled, or ""."""
        kept = self._digests[copies.group][copies.source_ids]
        changed = np.flatnonzero(kept != self._digest_pages(copies.group, copies.source_ids))
        if len(changed) == 0:
            return ""
        name = self._groups[copies.group].group.name
        return f"host memory has changed: page {copies.source_ids[changed[0]]} of group {name}"

    def _digest_pages(self, group: int, page_ids: list[int]) -> Digests:
        """uint64[page], of pages in host memory."""
        ids = np.array(page_ids, dtype=np.int64)
        return digest_pages(self.buffers[group].numpy(), ids, self._groups[group].page_nbytes)

    def _copy(self, moved: list[PageCopies], *, is_spill: bool) -> None:
        for copies in moved:
            self._copy_group(copies, is_spill=is_spill)
        if self._stream is not None:
            self._stream.synchronize()

    def _copy_group(self, copies: PageCopies, *, is_spill: bool) -> None:
        pool, host = self._pool.buffers[copies.group], self.buffers[copies.group]
        target, source = (host, pool) if is_spill else (pool, host)
        runs = adjacent_runs(copies, self._groups[copies.group].page_nbytes)
        if self._stream is None:
            copy_runs(target.numpy(), source.numpy(), *runs)
        else:
            with torch.cuda.stream(self._stream):
                copy_slices(target, source, runs)


def start_host_pages(config: ServerConfig, pool: KvPool) -> HostPages:
    """The tier of a rank, every byte touched. Raises: ConfigError."""
    page_counts = decide_host_page_counts(pool.layout, config, list(pool.page_counts))
    if page_counts:
        check_host_memory(config, sum(KvPool.buffer_nbytes(pool.layout, page_counts)))
    return HostPages(pool, page_counts)


def adjacent_runs(copies: PageCopies, page_nbytes: int) -> Runs:
    """The copies as runs. Pages that follow each other on both sides are one run."""
    source = np.array(copies.source_ids, dtype=np.int64)
    target = np.array(copies.target_ids, dtype=np.int64)
    order = np.argsort(source)  # pages that were freed one by one are named in any order
    source, target = source[order], target[order]
    is_first = np.ones(len(source), dtype=np.bool_)
    is_first[1:] = (np.diff(source) != 1) | (np.diff(target) != 1)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(firsts, append=len(source))
    return target[firsts] * page_nbytes, source[firsts] * page_nbytes, counts * page_nbytes


def copy_slices(target: Tensor, source: Tensor, runs: Runs) -> None:
    """The same copies as by `copy_runs`, between a device and pinned memory: launched on the
    current stream, and not waited for."""
    columns = (column.tolist() for column in runs)
    for target_start, source_start, nbytes in zip(*columns, strict=True):
        run = source[source_start : source_start + nbytes]
        target[target_start : target_start + nbytes].copy_(run, non_blocking=True)


def _allocate(nbytes: int, *, is_pinned: bool) -> Tensor:
    """uint8[nbytes] of this process's own memory, every byte touched. Raises: NotNow."""
    with enough_memory("the tier in host memory", LESS_HOST_MEMORY):
        memory = torch.empty(nbytes, dtype=torch.uint8).zero_()
    if is_pinned and nbytes:
        # Torch's own pinned memory is rounded up to a power of two, up to twice as much.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if code != 0:
            raise NotNow(
                f"{nbytes} bytes of the tier in host memory can't be pinned, CUDA error {code}; "
                f"{LESS_HOST_MEMORY}"
            )
    return memory

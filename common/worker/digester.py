"""Digests of transferred caches, computed beside the engine and the I/O thread.

The scheduler asks when no write to the pages is left, so nothing is waited for here. On CUDA the
kernels run on a stream of their own. Knows nothing of requests, and compares nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue

import torch
from torch import Tensor

from common.engine.cache.digest import PlaneReader
from common.layout.cache_layout import RankLayout, ServerLayout
from common.planner.digests import (
    DigestedPlane,
    bucket_count,
    bucket_of_item,
    digested_planes,
    held_units,
    wire_dtypes,
)
from common.planner.pairing import TokenRange, units_to_write
from common.protocol.codec import decode_layout
from common.protocol.digests import Digest, Digested

DigestJobs = SimpleQueue[Digest | None]
"""From the I/O thread; None ends it. The scheduler bounds it: one for each transfer that waits for
its digests."""

PEER_LAYOUT_COUNT_MAX = 64

PlaneKey = tuple[str, str, int]
"""Component, segment, layer."""


class Digester:
    """The pool's buffers of one rank, one per page group, as digests read them."""

    def __init__(self, buffers: Sequence[Tensor], layout: RankLayout) -> None:
        self._buffers = tuple(buffers)
        self._layout = layout
        self.device = buffers[0].device
        self._stream = (
            torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            if self.device.type == "cuda"
            else None
        )
        self._peers: dict[bytes, _Pair] = {}

    @torch.inference_mode()
    def run(self, job: Digest) -> Digested:
        """Raises: PlanMismatch or ProtocolError never: the scheduler has compared the layouts."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            pair = self._pair(job)
            own = self._layout.server
            if job.is_source:
                targets: Iterable[RankLayout] = pair.peer.ranks
            else:
                targets = (self._layout,)
            target_server = pair.peer if job.is_source else own
            known: dict[tuple[PlaneKey, range], Tensor] = {}
            count = bucket_count(target_server)
            digests = [self._digest(pair, job, target, count, known) for target in targets]
        return Digested(job.transfer_id, self._layout.index, digests)

    def _digest(
        self,
        pair: _Pair,
        job: Digest,
        target: RankLayout,
        count: int,
        known: dict[tuple[PlaneKey, range], Tensor],
    ) -> bytes:
        """Digests of one target rank. known: digests computed for other target ranks already."""
        planes = digested_planes(target, job.verify, job.transfer_id)
        rows = torch.zeros((len(planes), count), dtype=torch.int64, device=self.device)
        buckets: dict[int, Tensor] = {}
        tokens = TokenRange(job.token_start, job.token_count, is_final=True)
        for row, plane in zip(rows, planes, strict=True):
            key = _plane_key(plane)
            reader = pair.readers.get(key)
            items = tokens.items(self._layout.groups[plane.group].group.live)
            units = (
                units_to_write(plane.cell, self._layout, target)
                if job.is_source
                else held_units(plane.cell, target)
            )
            if reader is None or not items or not units:
                continue
            if (key, units) not in known:
                if plane.group not in buckets:
                    numbers = torch.from_numpy(bucket_of_item(len(items), count))
                    buckets[plane.group] = numbers.to(self.device)
                known[key, units] = reader.digests(
                    units, items, job.pages[plane.group], buckets[plane.group], count
                )
            row.copy_(known[key, units])
        return rows.cpu().numpy().tobytes()

    def _pair(self, job: Digest) -> _Pair:
        """The readers for transfers from or to servers of one layout, kept for the next one."""
        key = bytes([job.is_source]) + job.layout
        pair = self._peers.get(key)
        if pair is None:
            if len(self._peers) >= PEER_LAYOUT_COUNT_MAX:
                del self._peers[next(iter(self._peers))]
            pair = self._peers[key] = _Pair(self._buffers, self._layout, job)
        return pair


class _Pair:
    """Readers of this rank's planes for transfers from or to a server of one layout."""

    def __init__(self, buffers: Sequence[Tensor], layout: RankLayout, job: Digest) -> None:
        self.peer: ServerLayout = decode_layout(job.layout)
        wires = wire_dtypes(layout.server, self.peer)
        self.readers: dict[PlaneKey, PlaneReader] = {}
        for buffer, group in zip(buffers, layout.groups, strict=True):
            stored = {
                (c.name, layer): c.dtype for c in group.group.components for layer in c.layers
            }
            for cell in group.cells:
                name = cell.component, cell.layer
                self.readers[cell.component, cell.segment, cell.layer] = PlaneReader(
                    buffer, group, cell, stored[name], wires[name]
                )


def _plane_key(plane: DigestedPlane) -> PlaneKey:
    return plane.cell.component, plane.cell.segment, plane.cell.layer

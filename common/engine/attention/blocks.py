"""Blocks of consecutive tokens that end in a pass, and the rows of tokens that they are made of.

A block's rows may have been computed in this pass or in earlier ones; those of earlier ones lie in
a tail, a ring with one page per sequence. What is made of the rows is the layer's business.

    tail(size 4, back 4), 10 tokens cached     ring rows    8  9  2  3  4  5  6  7   (token ids)
    2 new tokens close block 2                 its rows     4  5  6  7 | 8  9 | 10 11
                                                            before       ring   new
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.attention.attention import CacheWriter
from common.engine.cache.cast import raw
from common.engine.cache.kv_pool import Geometry, KvPool, WriteIndex, write_index
from common.engine.forward_batch import ForwardBatch
from common.engine.host_copy import upload
from common.layout.component import LiveKind


@dataclass(frozen=True, slots=True)
class ClosedBlocks:
    """The n blocks of `size` tokens whose last token is new; in order of sequence and position.

    sequences: int64[n], rows of the batch's sequences. blocks: int64[n], absolute block indices.
    """

    size: int
    sequences: Tensor
    blocks: Tensor

    @staticmethod
    def of(batch: ForwardBatch, size: int) -> ClosedBlocks:
        firsts = torch.tensor(batch.start_list) // size
        counts = torch.tensor(batch.kv_length_list) // size - firsts
        sequences = torch.repeat_interleave(torch.arange(len(counts)), counts)
        before = counts.cumsum(0) - counts
        blocks = firsts[sequences] + torch.arange(len(sequences)) - before[sequences]
        device = batch.token_ids.device
        return ClosedBlocks(size, sequences.to(device), blocks.to(device))

    @property
    def count(self) -> int:
        return len(self.blocks)

    @property
    def first_positions(self) -> Tensor:
        """int64[n], the position of each block's first token."""
        return self.blocks * self.size


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The rows from which a layer makes n blocks.

    rows: [n, back + size, element]; those before a block come first. is_missing: bool[n, back +
    size, 1], True where the sequence has no such token; the row is another one then.
    """

    rows: Tensor
    is_missing: Tensor


@dataclass(frozen=True, slots=True)
class _TailPlan:
    """Where the rows of closed blocks are, for all layers and tails of one page group.

    pages: int64[m], the rings to read. places: int64[n, back + size], rows of [m rings | new].
    """

    pages: Tensor
    places: Tensor
    is_missing: Tensor


class BlockPass:
    """The blocks of one forward pass; what layers share is prepared once."""

    def __init__(self, batch: ForwardBatch, pool: KvPool) -> None:
        self._batch = batch
        self._pool = pool
        self._writer = CacheWriter(batch, pool)
        self._closed: dict[int, ClosedBlocks] = {}
        self._tails: dict[int, _TailPlan] = {}
        self._indexes: dict[Geometry, WriteIndex] = {}

    def collect(self, tail: str, layer: int, rows: Tensor) -> BlockRows | None:
        """Keep the rows [T, element] of the new tokens; None if they close no block."""
        plane = self._pool.plane(tail, layer)
        group = plane.geometry.group
        live = self._pool.groups[group].live
        assert live.kind is LiveKind.TAIL, live
        closed = self._of_size(live.size)
        found: BlockRows | None = None
        if closed.count:
            if group not in self._tails:
                self._tails[group] = self._plan_tail(group, closed)
            plan = self._tails[group]
            # Before the new rows take the place of old ones.
            rings = raw(plane.view)[plan.pages, 0].view(plane.view.dtype).flatten(0, 1)
            known = torch.cat((rings, rows.to(rings.dtype)))
            found = BlockRows(known[plan.places], plan.is_missing)
        self._writer.write(tail, layer, rows[:, None])
        return found

    def put(self, component: str, layer: int, blocks: Tensor) -> None:
        """Append [n, element], what the layer made of the closed blocks."""
        plane = self._pool.plane(component, layer)
        geometry = plane.geometry
        if geometry not in self._indexes:
            live = self._pool.groups[geometry.group].live
            assert live.kind is LiveKind.BLOCK, live
            closed = self._of_size(live.size)
            pages = closed.blocks // geometry.page_items
            table = self._batch.page_tables[geometry.group]
            self._indexes[geometry] = write_index(
                geometry,
                table[closed.sequences, pages].to(torch.int64),
                closed.blocks % geometry.page_items,
            )
        plane.write(self._indexes[geometry], blocks[:, None])

    def _of_size(self, size: int) -> ClosedBlocks:
        if size not in self._closed:
            self._closed[size] = ClosedBlocks.of(self._batch, size)
        return self._closed[size]

    def _plan_tail(self, group: int, closed: ClosedBlocks) -> _TailPlan:
        batch, live = self._batch, self._pool.groups[group].live
        ring_size = self._pool.page_items[group]
        readers, reader = torch.unique(closed.sequences, return_inverse=True)
        device = readers.device
        span = torch.arange(-live.back, live.size, device=device)
        positions = closed.first_positions[:, None] + span
        # A sequence that goes on from another one of the pass has its rows there.
        firsts = closed.sequences
        if batch.state_pages:
            (first_of,) = upload(device, _firsts(batch))
            firsts = first_of[closed.sequences]
        starts = batch.starts[firsts].to(torch.int64)[:, None]
        first_rows = batch.query_starts[firsts].to(torch.int64)[:, None]
        old = reader[:, None] * ring_size + positions % ring_size
        new = len(readers) * ring_size + first_rows + positions - starts
        is_missing = positions < 0
        # Whatever stands for a missing row has to be a number: a new one is.
        places = torch.where(positions < starts, old, new)
        places = places.masked_fill(is_missing, len(readers) * ring_size)
        pages = batch.page_tables[group][readers, 0].to(torch.int64)
        return _TailPlan(pages, places, is_missing[:, :, None])


def _firsts(batch: ForwardBatch) -> NDArray[np.int64]:
    """int64[B], the sequence of the pass that each goes on from, over others too; or itself."""
    firsts = np.arange(batch.sequence_count)
    for before in sorted(batch.state_pages):
        firsts[before + 1] = firsts[before]
    return firsts

"""The sequences a worker runs, as arrays by slot: lengths, latest tokens and page tables.

A step for 256 running sequences reads them with a few gathers instead of 256 small Python objects.
Lengths and page tables lie on the host, latest tokens on the model's device: a sequence's length is
known before its token is drawn, and a pass is planned with both. Knows nothing of models, sampling
or messages. Slot numbers are reused; the smallest free one is taken first.
"""

from __future__ import annotations

import heapq
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.layout.cache_layout import PageGroup
from common.layout.component import LiveKind

SLOT_COUNT_START = 16
PAGE_WIDTH_START = 16
"""Slots, and pages per slot, that exist at first; both double when they run out."""

Slots = NDArray[np.int64]
PageTable = NDArray[np.int32]


class SequenceTable:
    """One writer: the thread that runs the model.

    lengths: int64[S], tokens of each slot, those included that are launched and not drawn yet.
    latest: int64[S], the last of them, on the device, as soon as what is launched has run.
    page_tables: one int32[S, pages] per page group; 0 is the scratch page.
    """

    def __init__(self, groups: tuple[PageGroup, ...], device: torch.device) -> None:
        self._groups = groups
        self.device = device
        self.lengths: Slots = np.zeros(0, dtype=np.int64)
        self.latest = torch.zeros(0, dtype=torch.int64, device=device)
        self.page_tables: list[PageTable] = [np.zeros((0, 0), dtype=np.int32) for _ in groups]
        # Logical page index behind the last granted page, per group and slot.
        self._granted: list[Slots] = [np.zeros(0, dtype=np.int64) for _ in groups]
        self._slot_of: dict[int, int] = {}
        self._tokens: dict[int, Tensor] = {}
        self._free: list[int] = []

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def request_ids(self) -> list[int]:
        return list(self._slot_of)

    def slot(self, request_id: int) -> int:
        return self._slot_of[request_id]

    def slots(self, request_ids: list[int]) -> Slots:
        return np.fromiter(map(self._slot_of.__getitem__, request_ids), np.int64, len(request_ids))

    def tokens(self, slot: int) -> Tensor:
        """int64[n] on the host: the tokens the sequence came with."""
        return self._tokens[slot]

    def add(self, request_id: int, token_ids: Tensor) -> int:
        """Take a slot for a sequence that comes with int64[n] tokens, n > 0, on the host."""
        assert request_id not in self._slot_of, f"request {request_id} is already running"
        if not self._free:
            self._grow_slots()
        slot = heapq.heappop(self._free)
        self._slot_of[request_id] = slot
        self._tokens[slot] = token_ids
        self.lengths[slot] = len(token_ids)
        self.latest[slot] = int(token_ids[-1])
        return slot

    def remove(self, request_id: int) -> int:
        """Forget a sequence; returns the slot it had."""
        slot = self._slot_of.pop(request_id)
        del self._tokens[slot]
        for table, granted in zip(self.page_tables, self._granted, strict=True):
            table[slot] = 0
            granted[slot] = 0
        heapq.heappush(self._free, slot)
        return slot

    def grant(self, group: int, grants: list[tuple[int, int, list[int]]]) -> None:
        """Write page ids into tables: (slot, first logical page index, page ids), of one group."""
        if not grants:
            return
        counts = [len(page_ids) for _, _, page_ids in grants]
        ends = [first + len(page_ids) for _, first, page_ids in grants]
        self._widen(group, max(ends))
        rows = np.repeat([slot for slot, _, _ in grants], counts)
        columns = np.concatenate([np.arange(first, first + len(ids)) for _, first, ids in grants])
        pages = np.concatenate([np.asarray(ids, dtype=np.int32) for _, _, ids in grants])
        self.page_tables[group][rows, columns] = pages
        granted = self._granted[group]
        for (slot, _, _), end in zip(grants, ends, strict=True):
            granted[slot] = max(granted[slot], end)

    def append(
        self, slots: Slots, index: Tensor, token_ids: Tensor, counts: Slots | int = 1
    ) -> None:
        """So many sampled tokens to each of these distinct slots.

        index: `slots` on the device. token_ids: int64[len(slots)] there, the last one of each.
        """
        self.latest.index_copy_(0, index, token_ids)
        self.lengths[slots] += counts

    def page_table(self, group: int, slots: Slots, kv_lengths: NDArray[np.int64]) -> PageTable:
        """int32[B, pages], just wide enough for the longest of `kv_lengths` tokens."""
        needed = _page_ends(self._groups[group], kv_lengths)
        assert (needed <= self._granted[group][slots]).all(), "a token has no page to go to"
        width = int(needed.max())
        return self.page_tables[group][slots, :width]

    def covered(self, slots: Slots) -> Slots:
        """Tokens of each slot that its pages have room for, in every page group."""
        covered = np.full(len(slots), np.iinfo(np.int64).max)
        for group, granted in zip(self._groups, self._granted, strict=True):
            covered = np.minimum(covered, _covered_tokens(group, granted[slots]))
        return covered

    def first_pages(self, slot: int) -> list[int]:
        """Per group, the page of logical index 0: of a slot or a tail the only one; 0 if none."""
        return [int(table[slot, 0]) if table.shape[1] else 0 for table in self.page_tables]

    def _grow_slots(self) -> None:
        old = len(self.lengths)
        new = max(2 * old, SLOT_COUNT_START)
        self.lengths = np.pad(self.lengths, (0, new - old))
        self.latest = torch.cat((self.latest, self.latest.new_zeros(new - old)))
        self._granted = [np.pad(granted, (0, new - old)) for granted in self._granted]
        self.page_tables = [_enlarged(t, new, t.shape[1]) for t in self.page_tables]
        self._free = list(range(old, new))

    def _widen(self, group: int, page_count: int) -> None:
        table = self.page_tables[group]
        if page_count > table.shape[1]:
            width = max(page_count, 2 * table.shape[1], PAGE_WIDTH_START)
            self.page_tables[group] = _enlarged(table, table.shape[0], width)


def _page_ends(group: PageGroup, kv_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`PageGroup.page_end` of many sequences."""
    match group.live.kind:
        case LiveKind.FULL | LiveKind.WINDOW:
            return -(-kv_lengths // group.page_items)
        case LiveKind.BLOCK:
            return -(-(kv_lengths // group.live.size) // group.page_items)
        case LiveKind.TAIL | LiveKind.SLOT:
            return np.ones_like(kv_lengths)
        case _:
            assert_never(group.live.kind)


def _covered_tokens(group: PageGroup, page_ends: Slots) -> Slots:
    """The most tokens whose `_page_ends` are these."""
    match group.live.kind:
        case LiveKind.FULL | LiveKind.WINDOW:
            return page_ends * group.page_items
        case LiveKind.BLOCK:
            return (page_ends * group.page_items + 1) * group.live.size - 1
        case LiveKind.TAIL | LiveKind.SLOT:
            return np.full_like(page_ends, np.iinfo(np.int64).max)
        case _:
            assert_never(group.live.kind)


def _enlarged(table: PageTable, row_count: int, column_count: int) -> PageTable:
    return np.pad(table, ((0, row_count - table.shape[0]), (0, column_count - table.shape[1])))

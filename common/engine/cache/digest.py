"""Digests of cached items: integer arithmetic on raw bytes, alike on every device.

An item's payload is read as words, each times an odd factor of its place, and summed; with the
item's and the unit's number the sum is mixed, and mixed values are summed over units and items, all
modulo 2**64. One changed word always changes its item's sum, and mixing is one to one, so a single
changed byte is always seen; partial sums of ranks add up. Knows nothing of peers or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from common.engine.cache.cast import CACHE_DTYPES, cast
from common.layout.cache_layout import Cell, GroupLayout

# Pages that are digested together: as many as a CPU's cache holds, and enough to keep a GPU busy.
BLOCK_NBYTES_CPU = 1 << 20
BLOCK_NBYTES_CUDA = 64 << 20

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The widest word that a payload is a whole number of, by its bytes."""

FACTOR_STEP = 0x5851F42D4C957F2D
UNIT_STEP = 0x2545F4914F6CDD1D
ITEM_STEP = 0x1E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)


class PlaneReader:
    """One plane of a rank's pool, as digests read it.

    buffer: uint8, of the page group. stored, wire: element types in memory and on the way.
    """

    def __init__(
        self, buffer: Tensor, group: GroupLayout, cell: Cell, stored: str, wire: str
    ) -> None:
        self._group = group
        self._cell = cell
        self._stored, self._wire = CACHE_DTYPES[stored], CACHE_DTYPES[wire]
        nbytes = (group.page_nbytes, cell.offset, cell.unit_stride, cell.item_nbytes)
        size = max(size for size in WORDS if all(n % size == 0 for n in nbytes))
        words = buffer[: len(buffer) // size * size].view(WORDS[size])
        self._view = torch.as_strided(
            words,
            (
                len(buffer) // group.page_nbytes,
                len(cell.units),
                group.group.page_items,
                cell.item_nbytes // size,
            ),
            (group.page_nbytes // size, cell.unit_stride // size, cell.item_nbytes // size, 1),
            storage_offset=words.storage_offset() + cell.offset // size,
        )
        is_cuda = buffer.device.type == "cuda"
        page_nbytes = max(1, len(cell.units) * group.group.page_items * cell.item_nbytes)
        block_nbytes = BLOCK_NBYTES_CUDA if is_cuda else BLOCK_NBYTES_CPU
        self._block_page_count = max(1, block_nbytes // page_nbytes)

    def digests(
        self,
        units: range,
        items: range,
        pages: tuple[int, Sequence[int]],
        buckets: Tensor,
        bucket_count: int,
    ) -> Tensor:
        """int64[bucket]: the digests of some units and items, on the device.

        units: global ids, of those that the plane has here. items: at least one. pages: (first
            logical index, page ids), which must cover them. buckets: int64[item].
        """
        first_index, page_ids = pages
        indices = self._group.group.page_indices(items)
        ids = list(page_ids[indices.start - first_index : indices.stop - first_index])
        assert indices.start >= first_index and len(ids) == len(indices), (items, pages)
        device = self._view.device
        first_unit = units.start - self._cell.units.start
        view = self._view[:, first_unit : first_unit + len(units)]
        sums = torch.cat(
            [
                self._page_sums(view, torch.tensor(ids[start : start + self._block_page_count]))
                for start in range(0, len(ids), self._block_page_count)
            ]
        )
        numbers = torch.arange(items.start, items.stop, device=device)
        page_items = self._group.group.page_items
        rows = numbers % page_items
        if self._group.group.live.is_paged:
            rows = numbers - indices.start * page_items
        unit_ids = torch.arange(units.start, units.stop, device=device)
        keys = (numbers * ITEM_STEP)[:, None] + unit_ids * UNIT_STEP
        mixed = _mix(sums.index_select(0, rows) + _mix(keys))
        total = torch.zeros(bucket_count, dtype=torch.int64, device=device)
        return total.index_add_(0, buckets, mixed.sum(1))

    def _page_sums(self, view: Tensor, page_ids: Tensor) -> Tensor:
        """int64[row of all pages, unit]: the weighted sum of every payload."""
        pages = view.index_select(0, page_ids.to(view.device))
        payloads = pages.view(torch.uint8)
        if self._stored != self._wire:
            payloads = cast(payloads.view(self._stored), self._wire).view(torch.uint8)
        size = max(size for size in WORDS if payloads.shape[-1] % size == 0)
        words = payloads.view(WORDS[size])
        factors = _factors(words.shape[-1], words.device)
        # These words are a copy already: fresh memory would cost more than the products.
        return words.to(torch.int64).mul_(factors).sum(-1).transpose(1, 2).flatten(0, 1)


def _mix(values: Tensor) -> Tensor:
    """splitmix64's finish, one to one."""
    values = (values ^ _shift(values, 30)) * FIRST_FACTOR
    values = (values ^ _shift(values, 27)) * SECOND_FACTOR
    return values ^ _shift(values, 31)


def _shift(values: Tensor, count: int) -> Tensor:
    """To the right, filled with zeros; torch fills with the sign."""
    return (values >> count) & ((1 << (64 - count)) - 1)


@lru_cache(maxsize=64)
def _factors(count: int, device: torch.device) -> Tensor:
    """int64[count], odd, and the same everywhere: that is what makes digests comparable."""
    return _mix(torch.arange(1, count + 1, device=device) * FACTOR_STEP) | 1

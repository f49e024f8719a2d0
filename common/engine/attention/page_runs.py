"""The pages that sequences read in one pass, one after the other, as paged kernels take them.

A page table has a page for every logical index from 0 on; a window reads the last ones only, and
those before may be another's by now. So a run begins with the first page that is read, and a
sequence counts its tokens from there:

    window of 4, pages of 2, 9 tokens, 2 of them new     positions   0 1|2 3|4 5|6 7|8
    token 7 is the first new one and sees 4 .. 7         run                |4 5|6 7|8    length 5

Masks compare distances from a sequence's end, which a shifted origin leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.host_copy import upload


@dataclass(frozen=True, slots=True)
class PageRuns:
    """starts: int32[B + 1], lengths: int32[B] in tokens, last_page_lengths: int32[B], on the CPU,
    where kernels plan. page_ids: int32[starts[-1]] on the device."""

    starts: Tensor
    lengths: Tensor
    last_page_lengths: Tensor
    page_ids: Tensor


@dataclass(frozen=True, slots=True)
class HostRuns:
    """As `PageRuns`, in numpy. first_pages: int64[B], the logical page that each begins with."""

    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    last_page_lengths: NDArray[np.int32]
    first_pages: NDArray[np.int64]

    @staticmethod
    def of(
        lengths: NDArray[np.int64], new_counts: NDArray[np.int64], page_items: int, window: int
    ) -> HostRuns:
        """Pages that the last `new_counts` of `lengths` tokens see together."""
        first_pages = np.zeros_like(lengths)
        if window:
            first_pages = np.maximum(lengths - new_counts - window + 1, 0) // page_items
        counts = -(-lengths // page_items) - first_pages
        starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        starts[1:] = counts.cumsum()
        return HostRuns(
            starts=starts,
            lengths=(lengths - first_pages * page_items).astype(np.int32),
            last_page_lengths=(lengths - (first_pages + counts - 1) * page_items).astype(np.int32),
            first_pages=first_pages,
        )

    @property
    def counts(self) -> NDArray[np.int64]:
        """int64[B], pages of each."""
        return np.diff(self.starts).astype(np.int64)

    def page_ids(self, table: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32[starts[-1]], from a table int32[B, pages]."""
        rows = np.repeat(np.arange(len(self.lengths)), self.counts)
        return table[rows, np.arange(len(rows)) + (self.first_pages - self.starts[:-1])[rows]]


def page_runs(
    table: Tensor,
    page_items: int,
    kv_lengths: Sequence[int],
    new_counts: Sequence[int],
    *,
    window: int = 0,
) -> PageRuns:
    """Pages that the last `new_counts` of kv_lengths tokens see together; no wait for the device.

    table: int32[B, pages]. window: in tokens, the token itself included; 0 for all of the past.
    """
    lengths, counts = (np.asarray(values, dtype=np.int64) for values in (kv_lengths, new_counts))
    runs = HostRuns.of(lengths, counts, page_items, window)
    count = int(runs.starts[-1])
    on_device = upload(table.device, runs.counts, runs.first_pages - runs.starts[:-1])
    rows = torch.repeat_interleave(on_device[0], output_size=count)
    columns = torch.arange(count, device=table.device) + on_device[1][rows]
    return PageRuns(
        starts=torch.from_numpy(runs.starts),
        lengths=torch.from_numpy(runs.lengths),
        last_page_lengths=torch.from_numpy(runs.last_page_lengths),
        page_ids=table[rows, columns],
    )

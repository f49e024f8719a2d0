"""Which decoding sequences are attended together, so that padding stays small and calls stay few.

Arithmetic over page counts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

# Padding that a bucket may always have: gathering this many pages costs about what the calls for
# one more bucket cost (40 us on CPU, with 2 heads of 32 floats and pages of 16 tokens).
PADDING_PAGES_FREE = 64

# A CPU reads gathered rows of a bucket again at once, so they should still be in the caches, in
# each core's share. With 2 MiB of L2 and 4 heads of 32 floats, attention over 16 sequences of
# 1,024 tokens (17 MB) takes 0.72 of its time in such parts; smaller ones cost more in calls.
GATHERED_NBYTES_EACH = 4 << 20


def pages_at_once(page_nbytes: int, device: torch.device) -> int:
    """Pages that a bucket gathers at most; page_nbytes: what a layer reads of one."""
    if device.type != "cpu":
        return sys.maxsize
    return max(1, GATHERED_NBYTES_EACH * torch.get_num_threads() // page_nbytes)


def bucket_by_pages(page_counts: Sequence[int], page_max: int = sys.maxsize) -> list[list[int]]:
    """Indexes of sequences, grouped by similar page counts, each index exactly once.

    In a bucket, all sequences are padded to the longest; padding stays within a quarter of the
    useful pages, or within PADDING_PAGES_FREE. Padding included, a bucket has page_max pages at
    most, unless it is one sequence. A single bucket keeps the order of the input.
    """
    order = sorted(range(len(page_counts)), key=lambda i: -page_counts[i])
    buckets: list[list[int]] = []
    widest = useful = padding = 0
    for index in order:
        pages = page_counts[index]
        is_tight = padding + widest - pages <= max(PADDING_PAGES_FREE, (useful + pages) // 4)
        if not buckets or not is_tight or widest * (len(buckets[-1]) + 1) > page_max:
            buckets.append([])
            widest, useful, padding = pages, 0, 0
        buckets[-1].append(index)
        useful += pages
        padding += widest - pages
    if len(buckets) == 1:
        return [list(range(len(page_counts)))]
    return buckets

"""Which decoding sequences are attended together, so that padding stays small and calls stay few.

Pure arithmetic over page counts.
"""

from __future__ import annotations

from collections.abc import Sequence

# Padding that a bucket may always have: gathering this many pages costs about what the calls for
# one more bucket cost (40 us on CPU, with 2 heads of 32 floats and pages of 16 tokens).
PADDING_PAGES_FREE = 64


def bucket_by_pages(page_counts: Sequence[int]) -> list[list[int]]:
    """Indexes of sequences, grouped by similar page counts, each index exactly once.

    In a bucket, all sequences are padded to the longest; padding stays within a quarter of the
    useful pages, or within PADDING_PAGES_FREE. A single bucket keeps the order of the input.
    """
    order = sorted(range(len(page_counts)), key=lambda i: -page_counts[i])
    buckets: list[list[int]] = []
    widest = useful = padding = 0
    for index in order:
        pages = page_counts[index]
        is_tight = padding + widest - pages <= max(PADDING_PAGES_FREE, (useful + pages) // 4)
        if not buckets or not is_tight:
            buckets.append([])
            widest, useful, padding = pages, 0, 0
        buckets[-1].append(index)
        useful += pages
        padding += widest - pages
    if len(buckets) == 1:
        return [list(range(len(page_counts)))]
    return buckets

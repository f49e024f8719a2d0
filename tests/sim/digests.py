"""What simulated ranks say of their pages: where they lie, and digests of what lies in them."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator
from functools import cache, lru_cache

from common.layout.cache_layout import ServerLayout
from common.planner.digests import bucket_count, bucket_of_item, digested_planes
from common.planner.pairing import TokenRange
from common.protocol.codec import decode_layout
from common.protocol.digests import Digest
from common.scheduling.facts import ServerFacts

# Those of the servers of a few stories.
LAYOUT_COUNT_MAX = 16


def digest_pages(
    own: ServerLayout, job: Digest, value: Callable[[int, int], int]
) -> Iterator[tuple[int, list[bytes]]]:
    """Digests by rank. value: what lies in the pages for an item of a group."""
    target = layout_of(job.layout) if job.is_source else own
    count = bucket_count(target)

    @cache
    def sums(group: int) -> bytes:
        """By bucket; all planes of a group hold the same."""
        tokens = TokenRange(job.token_start, job.token_count, is_final=True)
        items = tokens.items(own.groups[group].live)
        sums = [0] * count
        for item, bucket in zip(items, bucket_of_item(len(items), count).tolist(), strict=True):
            sums[bucket] += zlib.crc32(b"%d %d" % (item, value(group, item)))
        return array("q", sums).tobytes()

    for rank in own.ranks:
        digests: list[bytes] = []
        for other in target.ranks if job.is_source else (rank,):
            planes = digested_planes(other, job.verify, job.transfer_id)
            nothing = bytes(8 * count)
            digests.append(b"".join(nothing if rank.index else sums(p.group) for p in planes))
        yield rank.index, digests


@lru_cache(LAYOUT_COUNT_MAX)
def layout_of(layout: bytes) -> ServerLayout:
    return decode_layout(layout)


def regions_of(facts: ServerFacts, rank: int) -> list[tuple[str, int, int, bytes]]:
    """One region for each page group, as a rank announces it."""
    groups = zip(facts.layout.ranks[rank].groups, facts.page_counts, strict=True)
    return [
        (f"pages-{index}", 0, group.page_nbytes * (count + 1), b"key")
        for index, (group, count) in enumerate(groups)
    ]

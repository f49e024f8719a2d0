"""The planes of a transfer that are digested, in an order that both sides compute alike.

A *digest* is a number over the logical content of one plane: one segment of one component on one
layer, its units and items. Pages, layer groups and the way it travelled are no part of it. Every
target rank has digests of its own, since every rank that holds a unit checks its own copy; those of
the source ranks that wrote to it add up to them, modulo 2**64. Items that the target had before the
transfer are in none. A plane's other items are cut into a few *buckets*, so that a difference has a
place. Knows nothing of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.config import Verify
from common.layout.cache_layout import Cell, PageGroup, RankLayout, ServerLayout
from common.layout.conversion import wire_dtype
from common.layout.parallel import units_of_rank
from common.planner.copy_plan import Int64Array
from common.planner.pairing import TokenRange

BUCKET_COUNT_MAX = 16
DIGEST_COUNT_MAX = 1 << 16
"""Digests of a transfer, eight bytes each, as far as fewer buckets go."""

SAMPLE_STRIDE = 8
"""Of so many planes of a rank and page group, a sample has one: damage that touches every plane of
a page is found for certain, damage of a single plane once in so many transfers."""

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DigestedPlane:
    """One plane of one target rank that is digested. group: index of its page group."""

    group: int
    cell: Cell


@dataclass(frozen=True, slots=True)
class Difference:
    """The first stretch of pages that is not what was sent. Pages are logical, of the target."""

    rank: int
    component: str
    segment: str
    layer: int
    group: str
    first_page: int
    last_page: int

    def __str__(self) -> str:
        return (
            f"{self.component} ({self.segment}) of layer {self.layer} differs in pages "
            f"{self.first_page}..{self.last_page} of group {self.group} on rank {self.rank}"
        )


def digested_planes(target: RankLayout, verify: Verify, transfer_id: int) -> list[DigestedPlane]:
    """The planes of a target rank that a transfer's digests cover, in the order they come in.

    Of a sample, the transfer's id decides: every plane is as likely, and every page group has some.
    """
    found: list[DigestedPlane] = []
    if verify is Verify.OFF:
        return found
    for index, group in enumerate(target.groups):
        stride = 1
        if verify is Verify.SAMPLE:
            stride = max(1, min(SAMPLE_STRIDE, len(group.cells)))
        first = _mix(transfer_id + GOLDEN * (target.index * 64 + index + 1)) % stride
        # Layers come first: planes of one layer follow each other, and a cell is not told apart.
        found += [DigestedPlane(index, cell) for cell in group.cells[first::stride]]
    return found


def bucket_count(target: ServerLayout) -> int:
    """Digests per plane, so that all of them are a message of bounded size."""
    plane_count = sum(len(group.cells) for rank in target.ranks for group in rank.groups)
    return max(1, min(BUCKET_COUNT_MAX, DIGEST_COUNT_MAX // max(1, plane_count)))


def bucket_of_item(item_count: int, count: int) -> Int64Array:
    """int64[item_count]: the bucket of each transferred item, counted from the first one."""
    return np.arange(item_count, dtype=np.int64) * count // max(1, item_count)


def items_of_bucket(items: range, bucket: int, count: int) -> range:
    """The transferred items that lie in a bucket."""
    first = -(-bucket * len(items) // count)
    stop = -(-(bucket + 1) * len(items) // count)
    return items[first:stop]


def held_units(cell: Cell, target: RankLayout) -> range:
    """Global units of a plane that a rank holds."""
    return units_of_rank(cell.unit_count, cell.shard, target.server.tp_size, target.tp_rank)


def wire_dtypes(source: ServerLayout, target: ServerLayout) -> dict[tuple[str, int], str]:
    """The element type of each (component, layer) on the wire, in which it is digested.

    It is the narrower of both sides', so widening it again changes no digest.
    """
    theirs = {(c.name, layer): c.dtype for c in target.components for layer in c.layers}
    found: dict[tuple[str, int], str] = {}
    for component in source.components:
        for layer in component.layers:
            dtype = theirs.get((component.name, layer), component.dtype)
            found[component.name, layer] = wire_dtype(component.dtype, dtype) or component.dtype
    return found


def add_digests(one: Sequence[bytes], other: Sequence[bytes]) -> list[bytes]:
    """Sums modulo 2**64, per target rank. Both sides name the same ranks."""
    return [
        (np.frombuffer(a, dtype="<i8") + np.frombuffer(b, dtype="<i8")).tobytes()
        for a, b in zip(one, other, strict=True)
    ]


def find_difference(
    target: RankLayout,
    planes: Sequence[DigestedPlane],
    token_count: int,
    sent: bytes,
    found: bytes,
    *,
    token_start: int = 0,
) -> Difference | str | None:
    """The difference between the digests of one target rank; None if there is none.

    sent, found: int64[plane][bucket], little-endian. token_start: first token of the transfer, of
    token_count. A text says why they can't be compared.
    """
    count = bucket_count(target.server)
    expected_nbytes = len(planes) * count * 8
    if not len(sent) == len(found) == expected_nbytes:
        return (
            f"digests of rank {target.index}: {len(sent)} bytes were sent and {len(found)} found, "
            f"{expected_nbytes} are due"
        )
    if sent == found:
        return None
    unequal = np.frombuffer(sent, dtype="<i8") != np.frombuffer(found, dtype="<i8")
    plane_index, bucket = divmod(int(np.flatnonzero(unequal)[0]), count)
    plane = planes[plane_index]
    group: PageGroup = target.groups[plane.group].group
    items = TokenRange(token_start, token_count, is_final=True).items(group.live)
    pages = group.page_indices(items_of_bucket(items, bucket, count))
    cell = plane.cell
    return Difference(
        target.index,
        cell.component,
        cell.segment,
        cell.layer,
        group.name,
        pages.start,
        max(pages.start, pages.stop - 1),
    )


def _mix(value: int) -> int:
    """splitmix64's finish: every bit of the input changes half of the output."""
    value &= MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)

"""Correspondences between two ranks: units with units, cells with cells, items with items.

Both planners begin here, `copies.py` and `staging.py`. Knows nothing of page ids: units are global,
items are absolute, and pages are *logical* page indices, so both sides mean the same by the same
number whatever their page sizes are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import PlanMismatch
from common.layout.cache_layout import Cell, RankLayout, ServerLayout
from common.layout.component import Live, LiveKind, Shard
from common.layout.parallel import ranks_of_unit, units_of_rank
from common.planner.copy_plan import Int64Array


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Positions start..stop - 1 of a request, whose computation is finished.

    is_final: nothing is computed after `stop`, so windows, tails and slots leave as well. They
    leave whole, wherever the range starts; it may even be empty.
    """

    start: int
    stop: int
    is_final: bool

    def items(self, live: Live) -> range:
        """Absolute items of a component that leave with these tokens.

        Streamable items leave as they become final: a token at once, a block when it closes.
        Windows, tails and slots leave at the end, as they are live after `stop` tokens.
        """
        if not live.is_streamable:
            return live.items(self.stop) if self.is_final else range(0)
        if live.kind is LiveKind.BLOCK:
            return range(self.start // live.size, self.stop // live.size)
        return range(self.start, self.stop)


def pair_units(
    unit_count: int,
    shard: Shard,
    *,
    source_tp: int,
    source_rank: int,
    target_tp: int,
    target_rank: int,
) -> range:
    """Global units that one source rank writes to one target rank; ranks are tensor parallel ones.

    units          0 1 2 3 4 5
    source, tp 3  [0 1|2 3|4 5]         rank 1 -> rank 0: unit 2
    target, tp 2  [0 1 2|3 4 5]         rank 1 -> rank 1: unit 3

    Where several source ranks hold a unit, each target rank is written by one of them, elected by
    the target's own rank, so that replicas share the work and no byte is sent twice. All units
    that two ranks share are held by the same source ranks: either a rank holds a single unit, or
    it is the only one to hold its units, or all ranks hold all of them.
    """
    held = units_of_rank(unit_count, shard, source_tp, source_rank)
    wanted = units_of_rank(unit_count, shard, target_tp, target_rank)
    shared = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
    if not shared:
        return range(0)
    candidates = ranks_of_unit(shared.start, unit_count, shard, source_tp)
    elected = candidates[target_rank % len(candidates)]
    return shared if elected == source_rank else range(0)


def units_to_write(cell: Cell, source: RankLayout, target: RankLayout) -> range:
    """Global units of a plane that a source rank writes to a target rank, if it has the layer."""
    return pair_units(
        cell.unit_count,
        cell.shard,
        source_tp=source.server.tp_size,
        source_rank=source.tp_rank,
        target_tp=target.server.tp_size,
        target_rank=target.tp_rank,
    )


@dataclass(frozen=True, slots=True)
class CellPair:
    """One plane of one layer on both ranks. units: global ones that the source writes, if any."""

    source: Cell
    target: Cell
    units: range


def pair_cells(source: RankLayout, target: RankLayout) -> list[list[CellPair]]:
    """Per page group, the cells of planes and layers that both ranks have, in the source's order.

    Payloads of a pair may differ in size; each planner checks the sizes that it allows.
    Raises: PlanMismatch if the two sides do not cache the same things.
    """
    if len(source.groups) != len(target.groups):
        raise PlanMismatch(
            f"{len(source.groups)} page groups here, {len(target.groups)} at the target"
        )
    return [_pair_group(source, target, index) for index in range(len(source.groups))]


def _pair_group(source: RankLayout, target: RankLayout, index: int) -> list[CellPair]:
    ours, theirs = source.groups[index], target.groups[index]
    if theirs.group.live != ours.group.live:
        raise PlanMismatch(
            f"page group {index} is {ours.group.live} here, {theirs.group.live} at the target"
        )
    wanted = theirs.cell_of_plane
    pairs: list[CellPair] = []
    units_of_class: dict[tuple[int, Shard], range] = {}
    for cell in ours.cells:
        twin = wanted.get((cell.component, cell.segment, cell.layer))
        if twin is None:  # the layer is on another stage of the target
            continue
        unit_class = (cell.unit_count, cell.shard)
        if unit_class != (twin.unit_count, twin.shard):
            raise PlanMismatch(f"{cell} here is {twin} at the target")
        if unit_class not in units_of_class:
            units_of_class[unit_class] = units_to_write(cell, source, target)
        pairs.append(CellPair(cell, twin, units_of_class[unit_class]))
    return pairs


def expand_units(pairs: list[CellPair]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """One row for every unit of every pair, in order: (source base, target base, index of pair).

    A base is where item row 0 of the unit lies in a page of that side. All int64[row].
    """
    numbers = np.array(
        [
            (
                ours.offset + (units.start - ours.units.start) * ours.unit_stride,
                ours.unit_stride,
                theirs.offset + (units.start - theirs.units.start) * theirs.unit_stride,
                theirs.unit_stride,
                len(units),
            )
            for ours, theirs, units in ((pair.source, pair.target, pair.units) for pair in pairs)
        ],
        dtype=np.int64,
    ).reshape(len(pairs), 5)
    counts = numbers[:, 4]
    pair_of_row = np.repeat(np.arange(len(pairs)), counts)
    source_start, source_stride, target_start, target_stride = numbers[pair_of_row, :4].T
    # 0, 1, 2, ... within each pair of cells
    step = np.arange(len(pair_of_row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return source_start + step * source_stride, target_start + step * target_stride, pair_of_row


def rank_pairs(source: ServerLayout, target: ServerLayout) -> list[tuple[int, int]]:
    """Every (source rank, target rank) of which a transfer may write from the one to the other.

    Global ranks, in order: the pairs whose `PairPlan` is not empty, found without offsets.
    """
    cuts = {
        (layer, segment.unit_count, component.shard)
        for component in target.components
        for segment in component.segments
        for layer in component.layers
    }
    found: set[tuple[int, int]] = set()
    for source_stage, of_source in enumerate(source.stages):
        for target_stage, of_target in enumerate(target.stages):
            shared = range(max(of_source[0], of_target[0]), min(of_source[1], of_target[1]))
            for unit_count, shard in {cut[1:] for cut in cuts if cut[0] in shared}:
                found |= {
                    (
                        source_stage * source.tp_size + source_rank,
                        target_stage * target.tp_size + target_rank,
                    )
                    for source_rank in range(source.tp_size)
                    for target_rank in range(target.tp_size)
                    if pair_units(
                        unit_count,
                        shard,
                        source_tp=source.tp_size,
                        source_rank=source_rank,
                        target_tp=target.tp_size,
                        target_rank=target_rank,
                    )
                }
    return sorted(found)


@dataclass(frozen=True, slots=True)
class ItemRuns:
    """Stretches of items that lie in one page on both sides, in item order. All int64[run].

    source_page, target_page: logical page indices. source_row, target_row: rows in these pages.
    """

    source_page: Int64Array
    source_row: Int64Array
    target_page: Int64Array
    target_row: Int64Array
    count: Int64Array


def pair_items(
    items: range, source_page_items: int, target_page_items: int, *, is_paged: bool
) -> ItemRuns:
    """Cut a non-empty range of items wherever either side's page ends.

    items                873 ............................ 999
    source pages of 64    873..895 | 896..959 | 960..999          pages 13, 14, 15
    target pages of 256   873............................999      page 3

    An unpaged component has one page, in which item i is row i modulo the rows of a page: the
    ring of a tail, and the one row of a slot.
    """
    assert items, "an empty range has no runs"
    starts = _page_starts(items, source_page_items)
    if target_page_items != source_page_items:
        starts = np.union1d(starts, _page_starts(items, target_page_items))
    count = np.append(starts[1:], items.stop) - starts
    source_page, source_row = np.divmod(starts, source_page_items)
    target_page, target_row = np.divmod(starts, target_page_items)
    if not is_paged:
        source_page = np.zeros_like(starts)
        target_page = source_page
    return ItemRuns(source_page, source_row, target_page, target_row, count)


def _page_starts(items: range, page_items: int) -> Int64Array:
    """The first item, and every later one that begins a page."""
    first_border = (items.start // page_items + 1) * page_items
    borders = np.arange(first_border, items.stop, page_items, dtype=np.int64)
    return np.concatenate((np.array([items.start], dtype=np.int64), borders))

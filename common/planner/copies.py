"""The copies that carry items of one request from one rank to another: cells times page runs.

Knows nothing of families: every plane of every component is intersected alike, in layers, units
and items. A `PairPlan` holds everything that depends on the two layouts only; a request then costs
an outer sum of its pages and the offsets inside a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.errors import PlanMismatch
from common.layout.cache_layout import GroupLayout, RankLayout
from common.planner.coalesce import coalesce, sort_by_target
from common.planner.copy_plan import CopyPlan, Int64Array
from common.planner.pairing import (
    CellPair,
    ItemRuns,
    TokenRange,
    expand_units,
    pair_cells,
    pair_items,
)

PageList = tuple[int, Sequence[int] | Int64Array]
"""(First logical page index, page ids) of one page group. An array of ids is not
copied, so a caller that plans more than once with the same pages keeps one."""
Pages = Sequence[PageList]
Offsets = tuple[Int64Array, Int64Array, Int64Array]

# Shapes of page runs whose offsets are kept per page group. Whole pages have one shape; two page
# sizes have as many as the larger holds of the smaller; a request's ends add two more, which need
# not be remembered for ever.
SHAPE_COUNT_MAX = 64


def plan_copies(
    source: RankLayout,
    target: RankLayout,
    source_pages: Pages,
    target_pages: Pages,
    tokens: TokenRange,
) -> CopyPlan:
    """`PairPlan.plan` for a pair of ranks that is met only once."""
    return PairPlan(source, target).plan(source_pages, target_pages, tokens)


class PairPlan:
    """Everything about copying from one rank to another that no request changes.

    Page sizes, tensor and pipeline parallel sizes may differ between the two sides; the components
    must be the same ones in the same order, which the handshake makes sure of.
    """

    def __init__(
        self, source: RankLayout, target: RankLayout, layer_group: int | None = None
    ) -> None:
        """layer_group: plan for one layer group of the source rank only; None for all of them.

        Raises: PlanMismatch if the two sides do not cache the same things.
        """
        self._groups = tuple(
            _GroupPair(index, source.groups[index], target.groups[index], pairs, layer_group)
            for index, pairs in enumerate(pair_cells(source, target))
        )

    @property
    def is_empty(self) -> bool:
        """Whether no request can make this source rank write to this target rank."""
        return all(group.is_empty for group in self._groups)

    def plan(self, source_pages: Pages, target_pages: Pages, tokens: TokenRange) -> CopyPlan:
        """Byte ranges that carry `tokens` of one request from the source to the target rank.

        Args:
            source_pages, target_pages: per page group (first logical page index, page ids in item
                order); they may hold more than the range needs.
            tokens: half-open range of positions in the request, in tokens.
        Returns: arrays sorted by (target region, target offset), coalesced; the region of a page
            group is its index. Empty if the ranks share nothing of the range.
        Raises: PlanMismatch if a page list does not cover the range; never truncates.
        """
        if not len(source_pages) == len(target_pages) == len(self._groups):
            raise PlanMismatch(
                f"pages of {len(source_pages)} and {len(target_pages)} page groups for a cache of "
                f"{len(self._groups)}"
            )
        if not 0 <= tokens.start <= tokens.stop:
            raise PlanMismatch(f"tokens {tokens.start}..{tokens.stop} are no range")
        parts: list[CopyPlan] = []
        for group, source_list, target_list in zip(
            self._groups, source_pages, target_pages, strict=True
        ):
            part = group.plan(source_list, target_list, tokens)
            if part is not None:
                parts.append(part)
        return parts[0] if len(parts) == 1 else CopyPlan.concatenate(parts)


class _GroupPair:
    """One page group on both ranks.

    A row is one unit of one cell: `_source_base` and `_target_base` are where its item row 0 lies
    in a page of either side, `_item_nbytes` the size of an item. All int64[row].
    """

    def __init__(
        self,
        index: int,
        source: GroupLayout,
        target: GroupLayout,
        pairs: list[CellPair],
        layer_group: int | None,
    ) -> None:
        self._index = index
        self._source = source
        self._target = target
        self._live = source.group.live
        for pair in pairs:
            if pair.source.item_nbytes != pair.target.item_nbytes:
                raise PlanMismatch(f"{pair.source} here is {pair.target} at the target")
        if layer_group is not None:
            pairs = [pair for pair in pairs if pair.source.layer_group == layer_group]
        self._source_base, self._target_base, pair_of_row = expand_units(pairs)
        sizes = np.array([pair.source.item_nbytes for pair in pairs], dtype=np.int64)
        self._item_nbytes = sizes[pair_of_row]
        self._offsets_of_shape: dict[tuple[int, int, int], Offsets] = {}

    @property
    def is_empty(self) -> bool:
        return len(self._item_nbytes) == 0

    def plan(
        self,
        source_list: PageList,
        target_list: PageList,
        tokens: TokenRange,
    ) -> CopyPlan | None:
        """None if nothing of this group is copied."""
        items = tokens.items(self._live)
        if not items:
            return None
        runs = pair_items(
            items,
            self._source.group.page_items,
            self._target.group.page_items,
            is_paged=self._live.is_paged,
        )
        source_ids = self._look_up(source_list, runs.source_page, "source")
        target_ids = self._look_up(target_list, runs.target_page, "target")
        if self.is_empty:
            return None
        pieces = [
            self._copy(shape, source_ids[chosen], target_ids[chosen])
            for shape, chosen in _shapes(runs, self._target.group.page_items)
        ]
        source_offset, target_offset, nbytes = coalesce(*sort_by_target(*_join(pieces)))
        region = np.full(len(nbytes), self._index, dtype=np.int64)
        return CopyPlan(region, source_offset, region, target_offset, nbytes)

    def _copy(
        self, shape: tuple[int, int, int], source_ids: Int64Array, target_ids: Int64Array
    ) -> Offsets:
        """Copies between pages that are all cut alike: pages times offsets inside a page."""
        source_inner, target_inner, nbytes_inner = self._offsets(shape)
        order = np.argsort(target_ids)
        source_start = source_ids[order] * self._source.page_nbytes
        target_start = target_ids[order] * self._target.page_nbytes
        return (
            np.add.outer(source_start, source_inner).ravel(),
            np.add.outer(target_start, target_inner).ravel(),
            np.tile(nbytes_inner, len(order)),
        )

    def _offsets(self, shape: tuple[int, int, int]) -> Offsets:
        """Coalesced copies inside a page for runs of a (source row, target row, item count)."""
        found = self._offsets_of_shape.get(shape)
        if found is not None:
            return found
        source_row, target_row, count = shape
        found = coalesce(
            *sort_by_target(
                self._source_base + source_row * self._item_nbytes,
                self._target_base + target_row * self._item_nbytes,
                count * self._item_nbytes,
            )
        )
        if len(self._offsets_of_shape) >= SHAPE_COUNT_MAX:
            self._offsets_of_shape.pop(next(iter(self._offsets_of_shape)))
        self._offsets_of_shape[shape] = found
        return found

    def _look_up(self, pages: PageList, logical: Int64Array, side: str) -> Int64Array:
        """Page ids of ascending logical page indices."""
        first_index, page_ids = pages
        if logical[0] < first_index or logical[-1] >= first_index + len(page_ids):
            raise PlanMismatch(
                f"{side} pages {first_index}..{first_index + len(page_ids) - 1} of group "
                f"{self._index} do not cover {logical[0]}..{logical[-1]}"
            )
        found = np.asarray(page_ids, dtype=np.int64)[logical - first_index]
        if found.min() < 1:
            raise PlanMismatch(f"{side} page {found.min()} of group {self._index}: ids start at 1")
        return found


def _shapes(
    runs: ItemRuns, target_page_items: int
) -> list[tuple[tuple[int, int, int], Int64Array]]:
    """Distinct (source row, target row, item count) of runs, and the indices of their runs.

    A run ends where the first of its two pages does, so its rows determine its count. The last
    run may end with the range instead, so it always has a shape of its own.
    """
    last = len(runs.count) - 1
    keys = runs.source_row * target_page_items + runs.target_row
    keys[last] = -1
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    bounds = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return [
        (
            (
                int(runs.source_row[chosen[0]]),
                int(runs.target_row[chosen[0]]),
                int(runs.count[chosen[0]]),
            ),
            chosen,
        )
        for chosen in np.split(order, bounds)
    ]


def _join(pieces: list[Offsets]) -> Offsets:
    if len(pieces) == 1:
        return pieces[0]
    return (
        np.concatenate([source for source, _, _ in pieces]),
        np.concatenate([target for _, target, _ in pieces]),
        np.concatenate([nbytes for _, _, nbytes in pieces]),
    )

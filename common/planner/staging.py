"""Planner of staged transfers: the content of slots, and its place in the pages of either side.

    source pages --gather--> slot --one put--> slot at the target --scatter--> target pages

Both ranks compute the same rows from the two layouts, so a few numbers name a `StagedPiece`.
A *row* is one unit of one cell. A piece is a rectangle of rows and items, and lies in its slot as

    [row][item][payload]                  rows in the order of the source's cells, units inside

in the wire's element type. All rows of a piece are converted alike. Knows nothing of memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from common.errors import PlanMismatch
from common.layout.cache_layout import Cell, GroupLayout, PageGroup, RankLayout
from common.layout.component import DTYPE_NBYTES
from common.layout.conversion import wire_dtype
from common.planner.coalesce import coalesce
from common.planner.copies import PageList, Pages
from common.planner.copy_plan import Int64Array
from common.planner.pairing import CellPair, TokenRange, expand_units, pair_cells, pair_items


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """Content of one slot: rows row_first..row_stop - 1, items item_first..item_stop - 1."""

    group: int
    row_first: int
    row_stop: int
    item_first: int
    item_stop: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """Element types of a piece on both sides and on the way; all equal if nothing changes."""

    source: str
    target: str
    wire: str


@dataclass(frozen=True, slots=True)
class LinearCopy:
    """Runs between one side's pages and its linear form of a piece, in that side's element type.

    region: of all of the page offsets. Offsets and sizes in bytes, int64[run], ascending in
    linear_offset, which leaves no gap: the linear form has `nbytes.sum()` bytes.
    """

    region: int
    page_offset: Int64Array
    linear_offset: Int64Array
    nbytes: Int64Array

    @property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())


class StagedPair:
    """Everything about staging from one rank to another that no request changes.

    The element types of a component may differ between the two sides, as `conversion.py` allows.
    """

    def __init__(self, source: RankLayout, target: RankLayout) -> None:
        """Raises: PlanMismatch if the two sides do not cache the same things."""
        self._groups = tuple(
            _Rows(index, source.groups[index], target.groups[index], pairs)
            for index, pairs in enumerate(pair_cells(source, target))
        )

    @property
    def is_empty(self) -> bool:
        """Whether no request can make this source rank write to this target rank."""
        return all(group.row_count == 0 for group in self._groups)

    @property
    def is_converting(self) -> bool:
        """Whether any element type differs, so that copying bytes would be wrong."""
        return any(c.source != c.target for group in self._groups for c in group.conversions)

    @property
    def item_nbytes_max(self) -> int:
        """The largest payload, as it travels: no slot may be smaller."""
        return max((int(g.wire_nbytes.max(initial=0)) for g in self._groups), default=0)

    def pieces(
        self, tokens: TokenRange, slot_nbytes: int, layer_group: int | None = None
    ) -> list[StagedPiece]:
        """Pieces that carry `tokens` of a request, each at most `slot_nbytes` in the wire's types.

        layer_group: only the cells of one of the source's layer groups; None for all.
        Raises: PlanMismatch if a single payload is larger than a slot.
        """
        if self.item_nbytes_max > slot_nbytes:
            raise PlanMismatch(f"a payload of {self.item_nbytes_max} bytes in {slot_nbytes}")
        found: list[StagedPiece] = []
        for group in self._groups:
            items = tokens.items(group.live)
            if items:
                found += group.cut(items, slot_nbytes, layer_group)
        return found

    def conversion(self, piece: StagedPiece) -> Conversion:
        group = self._groups[piece.group]
        return group.conversions[int(group.conversion_of_row[piece.row_first])]

    def wire_nbytes(self, piece: StagedPiece) -> int:
        """Bytes of the slot that the piece takes."""
        rows = self._groups[piece.group].wire_nbytes[piece.row_first : piece.row_stop]
        return int(rows.sum()) * (piece.item_stop - piece.item_first)

    def why_bad(self, piece: StagedPiece, tokens: TokenRange, slot_nbytes: int) -> str | None:
        """The reason why a piece that a peer named can't be scattered; None if it can.

        tokens: all that are transferred, to the last of the request; only their live items are
        written, and the items before them are of other requests too.
        """
        if not 0 <= piece.group < len(self._groups):
            return f"group {piece.group}: must be in 0..{len(self._groups) - 1}"
        group = self._groups[piece.group]
        if not 0 <= piece.row_first < piece.row_stop <= group.row_count:
            return f"rows {piece.row_first}..{piece.row_stop}: must lie in 0..{group.row_count}"
        kinds = group.conversion_of_row[piece.row_first : piece.row_stop]
        if (kinds != kinds[0]).any():
            return f"rows {piece.row_first}..{piece.row_stop}: are not of one element type"
        live = tokens.items(group.live)
        if not live.start <= piece.item_first < piece.item_stop <= live.stop:
            return (
                f"items {piece.item_first}..{piece.item_stop}: must lie in "
                f"{live.start}..{live.stop}"
            )
        nbytes = self.wire_nbytes(piece)
        if nbytes > slot_nbytes:
            return f"a piece of {nbytes} bytes: a slot has {slot_nbytes}"
        return None

    def gather(self, piece: StagedPiece, source_pages: Pages) -> LinearCopy:
        """From the source's pages. Raises: PlanMismatch if they do not cover the piece."""
        group = self._groups[piece.group]
        return group.copy(piece, source_pages[piece.group], group.source, group.source_base)

    def scatter(self, piece: StagedPiece, target_pages: Pages) -> LinearCopy:
        """To the target's pages. Raises: PlanMismatch if they do not cover the piece."""
        group = self._groups[piece.group]
        return group.copy(piece, target_pages[piece.group], group.target, group.target_base)


class _Rows:
    """The rows of one page group that two ranks share, by layer group and conversion.

    source_base, target_base: int64[row], where item row 0 lies in a page of either side.
    *_nbytes: int64[row], size of one payload on either side and on the way.
    """

    def __init__(
        self, index: int, source: GroupLayout, target: GroupLayout, pairs: list[CellPair]
    ) -> None:
        self.index = index
        self.source = source
        self.target = target
        self.live = source.group.live
        converted = _conversions(source.group, target.group, pairs)
        self.conversions = tuple(dict.fromkeys(conversion for _, conversion in converted))
        kinds = {conversion: kind for kind, conversion in enumerate(self.conversions)}
        # Stable: cells keep their order.
        converted.sort(key=lambda entry: (entry[0].source.layer_group, kinds[entry[1]]))
        self.source_base, self.target_base, pair_of_row = expand_units([p for p, _ in converted])
        columns = np.array(
            [
                (p.source.layer_group, kinds[c], p.source.item_nbytes, p.target.item_nbytes)
                for p, c in converted
            ],
            dtype=np.int64,
        ).reshape(len(converted), 4)[pair_of_row]
        self.layer_group_of_row, self.conversion_of_row = columns[:, 0], columns[:, 1]
        self.source_nbytes, self.target_nbytes = columns[:, 2], columns[:, 3]
        self.wire_nbytes = np.minimum(self.source_nbytes, self.target_nbytes)
        self.row_count = len(columns)
        is_border = np.diff(columns[:, :2], axis=0).any(axis=1)
        borders = [0, *(np.flatnonzero(is_border) + 1).tolist(), self.row_count]
        self.blocks = [(a, b) for a, b in itertools.pairwise(borders) if a < b]

    def cut(self, items: range, slot_nbytes: int, layer_group: int | None) -> list[StagedPiece]:
        """Pieces of whole pages where a slot has room for them, so that their runs are long."""
        found: list[StagedPiece] = []
        for first, stop in self.blocks:
            if layer_group is not None and self.layer_group_of_row[first] != layer_group:
                continue
            sizes = self.wire_nbytes[first:stop]
            step = self._item_step(sizes, slot_nbytes)
            start = items.start
            while start < items.stop:
                # Later pieces begin where a page does on the side with the larger pages.
                end = min((start // step + 1) * step, items.stop)
                for rows in _cut_rows(first, sizes * (end - start), slot_nbytes):
                    found.append(StagedPiece(self.index, *rows, start, end))
                start = end
        return found

    def _item_step(self, sizes: Int64Array, slot_nbytes: int) -> int:
        """Items of a piece: whole pages, as many as fit with all rows, or at least with one row."""
        page_items = max(self.source.group.page_items, self.target.group.page_items)
        if int(sizes.max()) * page_items > slot_nbytes:
            return slot_nbytes // int(sizes.max())
        return page_items * max(1, slot_nbytes // (int(sizes.sum()) * page_items))

    def copy(
        self,
        piece: StagedPiece,
        pages: PageList,
        side: GroupLayout,
        base: Int64Array,
    ) -> LinearCopy:
        """One side's runs: its rows times the stretches of items that lie in one of its pages."""
        rows = slice(piece.row_first, piece.row_stop)
        is_source = base is self.source_base
        sizes = (self.source_nbytes if is_source else self.target_nbytes)[rows]
        items = range(piece.item_first, piece.item_stop)
        page_items = side.group.page_items
        runs = pair_items(items, page_items, page_items, is_paged=self.live.is_paged)
        first_index, page_ids = pages
        logical = runs.source_page - first_index
        if len(logical) == 0 or logical[0] < 0 or logical[-1] >= len(page_ids):
            raise PlanMismatch(f"pages of group {self.index} do not cover items {items}")
        ids = np.asarray(page_ids, dtype=np.int64)[logical]
        if ids.min() < 1:
            raise PlanMismatch(f"page {ids.min()} of group {self.index}: ids start at 1")
        page_start = ids * side.page_nbytes
        row_start = np.cumsum(sizes) - sizes
        passed = np.cumsum(runs.count) - runs.count
        page_offset = np.add.outer(base[rows], page_start) + np.multiply.outer(
            sizes, runs.source_row
        )
        linear = (row_start * len(items))[:, None] + np.multiply.outer(sizes, passed)
        nbytes = np.multiply.outer(sizes, runs.count)
        page_offset, linear, nbytes = coalesce(page_offset.ravel(), linear.ravel(), nbytes.ravel())
        return LinearCopy(self.index, page_offset, linear, nbytes)


def _cut_rows(first: int, sizes: Int64Array, slot_nbytes: int) -> list[tuple[int, int]]:
    """Stretches of rows, counted from `first`, whose sizes fit into a slot together."""
    ends = np.cumsum(sizes)
    found: list[tuple[int, int]] = []
    start, before = 0, 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, before + slot_nbytes, side="right"))
        assert stop > start, "a row of the piece is larger than a slot"
        found.append((first + start, first + stop))
        start, before = stop, int(ends[stop - 1])
    return found


def _conversions(
    source: PageGroup, target: PageGroup, pairs: list[CellPair]
) -> list[tuple[CellPair, Conversion]]:
    """The pairs that have units, with their element types. Raises: PlanMismatch."""
    source_dtypes, target_dtypes = _dtypes(source), _dtypes(target)
    found: list[tuple[CellPair, Conversion]] = []
    for pair in pairs:
        key = (pair.source.component, pair.source.layer)
        dtypes = (source_dtypes[key], target_dtypes[key])
        wire = wire_dtype(*dtypes)
        if wire is None or not _same_elements(pair.source, pair.target, *dtypes):
            raise PlanMismatch(
                f"{pair.source} of {dtypes[0]} here is {pair.target} of {dtypes[1]} at the target"
            )
        if pair.units:
            found.append((pair, Conversion(*dtypes, wire)))
    return found


def _dtypes(group: PageGroup) -> dict[tuple[str, int], str]:
    """Element type by (component, layer); one name may belong to several components."""
    return {(c.name, layer): c.dtype for c in group.components for layer in c.layers}


def _same_elements(cell: Cell, twin: Cell, source: str, target: str) -> bool:
    if source == target:
        return cell.item_nbytes == twin.item_nbytes
    return (
        cell.item_nbytes * DTYPE_NBYTES[target] == twin.item_nbytes * DTYPE_NBYTES[source]
        and cell.item_nbytes % DTYPE_NBYTES[source] == 0
    )

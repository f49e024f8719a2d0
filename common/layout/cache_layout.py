"""Where every cached byte lies on a rank: page groups, page envelopes and the cells inside them.

Pure geometry, computed alike on both sides from a `ServerLayout`; only page ids and memory keys
ever cross the wire. All components of a page group share one allocation, and one page is one
envelope:

    [page][layer group][unit class][unit][layer in group][plane][item in page][payload]

A *plane* is one segment of one component. A *unit class* holds the planes of a group whose units
are cut alike (same shard rule and unit count), so K and V of one head lie side by side and a whole
page, any head range of a page, and any layer range inside a head are each one run. Where element
types differ in a page group, a plane begins at a multiple of its own element, a unit and a page at
one of the largest: the few bytes of padding hold no data and are never transferred.
Page id 0 is a scratch page for padding and is never transferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from common.errors import LayoutError
from common.layout.component import DTYPE_NBYTES, CacheComponent, Live, LiveKind, Shard
from common.layout.parallel import check_units, split_layers, units_of_rank

PAGE_SIZE_MAX = 256


@dataclass(frozen=True)
class ServerLayout:
    """The cache of one server: its components and their cuts. Equal values give equal bytes.

    page_size: tokens per page of token-addressed groups, a power of two.
    stages: half-open global layer ranges, one per pipeline stage.
    layer_group_count: layer groups that stand outside the units in an envelope; more groups leave
        earlier while a prompt is computed, at the price of shorter head runs.
    """

    components: tuple[CacheComponent, ...]
    tp_size: int
    stages: tuple[tuple[int, int], ...]
    page_size: int
    layer_group_count: int = 1

    def check(self) -> None:
        """Raises: LayoutError naming the invalid value."""
        if not (1 <= self.page_size <= PAGE_SIZE_MAX and self.page_size.bit_count() == 1):
            raise LayoutError(
                f"page_size={self.page_size}: must be a power of two in 1..{PAGE_SIZE_MAX}"
            )
        if self.tp_size < 1:
            raise LayoutError(f"tp_size={self.tp_size}: must be at least 1")
        expected_first = 0
        for first, end in self.stages:
            if first != expected_first or end <= first:
                raise LayoutError(f"stages={self.stages}: must be consecutive non-empty ranges")
            expected_first = end
        if self.layer_group_count < 1:
            raise LayoutError(f"layer_group_count={self.layer_group_count}: must be at least 1")
        owned: set[tuple[str, int]] = set()
        for component in self.components:
            self._check_component(component, layer_count=expected_first)
            for layer in component.layers:
                if (component.name, layer) in owned:
                    raise LayoutError(f"component {component.name!r}: layer {layer} owns it twice")
                owned.add((component.name, layer))

    def _check_component(self, component: CacheComponent, layer_count: int) -> None:
        layers = component.layers
        if list(layers) != sorted(set(layers)) or (layers and not 0 <= layers[-1] < layer_count):
            raise LayoutError(
                f"component {component.name!r}: layers {layers} must be ascending "
                f"in 0..{layer_count - 1}"
            )
        if component.live.size < 0 or component.live.back < 0:
            raise LayoutError(f"component {component.name!r}: negative live rule {component.live}")
        if component.live.kind in (LiveKind.WINDOW, LiveKind.BLOCK, LiveKind.TAIL) and (
            component.live.size < 1
        ):
            raise LayoutError(
                f"component {component.name!r}: {component.live.kind} needs a size of at least 1"
            )
        names = [segment.name for segment in component.segments]
        if not names or len(set(names)) != len(names):
            raise LayoutError(
                f"component {component.name!r}: segments {names} must be at least one, each named "
                f"differently"
            )
        if component.dtype not in DTYPE_NBYTES:
            raise LayoutError(
                f"component {component.name!r}: dtype={component.dtype!r}: must be one of "
                f"{', '.join(DTYPE_NBYTES)}"
            )
        for segment in component.segments:
            if segment.unit_count < 1 or segment.unit_nbytes < 1:
                raise LayoutError(f"component {component.name!r}: empty segment {segment}")
            if segment.unit_nbytes % component.element_nbytes != 0:
                raise LayoutError(
                    f"component {component.name!r}: unit_nbytes={segment.unit_nbytes} of "
                    f"{segment.name!r}: must be a multiple of {component.element_nbytes}, the "
                    f"bytes of a {component.dtype}"
                )
            check_units(segment, component.shard, self.tp_size)

    def page_items(self, live: Live) -> int:
        """Items that one page of a component with this live rule holds."""
        match live.kind:
            case LiveKind.FULL | LiveKind.WINDOW:
                return self.page_size
            case LiveKind.BLOCK:
                return max(1, self.page_size // live.size)
            case LiveKind.TAIL:
                return live.size + live.back
            case LiveKind.SLOT:
                return 1

    @cached_property
    def groups(self) -> tuple[PageGroup, ...]:
        """Page groups in order of first appearance; the index is the group's id on the wire."""
        lives = dict.fromkeys(component.live for component in self.components)
        return tuple(
            PageGroup(
                live=live,
                page_items=self.page_items(live),
                components=tuple(c for c in self.components if c.live == live),
            )
            for live in lives
        )

    def page_nbytes(self, group: int) -> int:
        """Bytes of one page of a group on all ranks together. One stage may own nothing of it."""
        return sum(rank.groups[group].page_nbytes for rank in self.ranks)

    def rank(self, pp_rank: int, tp_rank: int) -> RankLayout:
        return RankLayout(self, pp_rank, tp_rank)

    @cached_property
    def ranks(self) -> tuple[RankLayout, ...]:
        """All ranks; the global rank is pp_rank * tp_size + tp_rank."""
        return tuple(
            RankLayout(self, pp_rank, tp_rank)
            for pp_rank in range(len(self.stages))
            for tp_rank in range(self.tp_size)
        )


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Components that share one page table because they have one live rule and page size."""

    live: Live
    page_items: int
    components: tuple[CacheComponent, ...]

    @property
    def name(self) -> str:
        """For people, and unlike that of every other group of a server: full, window-128, ..."""
        numbers = (number for number in (self.live.size, self.live.back) if number)
        return "-".join((self.live.kind, *map(str, numbers)))

    @property
    def page_tokens(self) -> int:
        """Tokens that one page covers; 0 where a request of any length has one page."""
        if not self.live.is_paged:
            return 0
        ratio = self.live.size if self.live.kind is LiveKind.BLOCK else 1
        return self.page_items * ratio

    def page_count(self, token_count: int) -> int:
        """Pages that the live items of `token_count` tokens touch."""
        items = self.live.items(token_count)
        if not self.live.is_paged:
            return 1
        return len(self.page_indices(items))

    def page_end(self, token_count: int) -> int:
        """Logical index behind the last page that `token_count` tokens need."""
        if not self.live.is_paged:
            return 1
        return -(-self.live.items(token_count).stop // self.page_items)

    def page_first(self, token_count: int) -> int:
        """Logical index of the first page that token number `token_count` reads, from 0."""
        if not self.live.is_paged:
            return 0
        return self.live.items(token_count).start // self.page_items

    def page_indices(self, items: range) -> range:
        """Logical page indices that a range of absolute items touches."""
        if not items:
            return range(0)
        if not self.live.is_paged:
            return range(1)
        return range(items.start // self.page_items, (items.stop - 1) // self.page_items + 1)


class Cell(msgspec.Struct, frozen=True):
    """One plane of one layer inside a rank's envelope.

    The payload of (unit u, item row r) starts at page * page_nbytes + offset
    + (u - units.start) * unit_stride + r * item_nbytes, and is `item_nbytes` long.
    """

    component: str
    segment: str
    layer: int
    offset: int
    units: range
    unit_stride: int
    item_nbytes: int
    shard: Shard
    unit_count: int
    layer_group: int


@dataclass(frozen=True)
class GroupLayout:
    """One page group on one rank: the size of a page envelope and its cells."""

    group: PageGroup
    page_nbytes: int
    cells: tuple[Cell, ...]

    @cached_property
    def cell_of_plane(self) -> dict[tuple[str, str, int], Cell]:
        """By component, segment and layer."""
        return {(cell.component, cell.segment, cell.layer): cell for cell in self.cells}

    def cell(self, component: str, layer: int, segment: str | None = None) -> Cell:
        for cell in self.cells:
            if (cell.component, cell.layer) == (component, layer) and segment in (
                None,
                cell.segment,
            ):
                return cell
        raise KeyError((component, layer, segment))


@dataclass(frozen=True)
class RankLayout:
    """The envelopes of one rank, one per page group, in the order of `ServerLayout.groups`.

    A group that owns nothing on this rank's layers has page_nbytes 0 and no cells.
    """

    server: ServerLayout
    pp_rank: int
    tp_rank: int

    @property
    def index(self) -> int:
        """Global rank in the server."""
        return self.pp_rank * self.server.tp_size + self.tp_rank

    @property
    def layers(self) -> range:
        return range(*self.server.stages[self.pp_rank])

    @cached_property
    def groups(self) -> tuple[GroupLayout, ...]:
        return tuple(self._lay_out(group) for group in self.server.groups)

    @cached_property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Global layer ids of each layer group of this rank."""
        count = min(self.server.layer_group_count, len(self.layers))
        bounds = split_layers(len(self.layers), count)
        return tuple(tuple(self.layers[first:end]) for first, end in bounds)

    def _lay_out(self, group: PageGroup) -> GroupLayout:
        cells: list[Cell] = []
        offset = 0
        alignment = max(component.element_nbytes for component in group.components)
        for layer_group, layers in enumerate(self.layer_groups):
            for shard, unit_count in _unit_classes(group):
                offset = self._lay_out_class(
                    group, shard, unit_count, layers, layer_group, offset, cells
                )
        return GroupLayout(group, page_nbytes=_round_up(offset, alignment), cells=tuple(cells))

    def _lay_out_class(
        self,
        group: PageGroup,
        shard: Shard,
        unit_count: int,
        layers: tuple[int, ...],
        layer_group: int,
        offset: int,
        cells: list[Cell],
    ) -> int:
        """Append the cells of one unit class of one layer group; returns the offset behind it."""
        planes = [
            (component, segment)
            for component in group.components
            if component.shard is shard
            for segment in component.segments
            if segment.unit_count == unit_count
        ]
        owned = [
            (layer, component, segment)
            for layer in layers
            for component, segment in planes
            if layer in component.layers
        ]
        units = units_of_rank(unit_count, shard, self.server.tp_size, self.tp_rank)
        # The start of a unit is aligned for all planes in it, so that all units are alike.
        alignment = max((component.element_nbytes for _, component, _ in owned), default=1)
        offset = _round_up(offset, alignment)
        inner_offsets: list[int] = []
        inner = 0
        for _, component, segment in owned:
            inner = _round_up(inner, component.element_nbytes)
            inner_offsets.append(inner)
            inner += segment.unit_nbytes * group.page_items
        unit_stride = _round_up(inner, alignment)
        for (layer, component, segment), inner in zip(owned, inner_offsets, strict=True):
            cells.append(
                Cell(
                    component=component.name,
                    segment=segment.name,
                    layer=layer,
                    offset=offset + inner,
                    units=units,
                    unit_stride=unit_stride,
                    item_nbytes=segment.unit_nbytes,
                    shard=shard,
                    unit_count=unit_count,
                    layer_group=layer_group,
                )
            )
        return offset + unit_stride * len(units)


def _round_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _unit_classes(group: PageGroup) -> list[tuple[Shard, int]]:
    """Distinct (shard, unit count) pairs of a group's planes, in order of first appearance."""
    return list(
        dict.fromkeys(
            (component.shard, segment.unit_count)
            for component in group.components
            for segment in component.segments
        )
    )

"""What a transfer must do, said slowly: every element found by walking envelopes plane by plane.

Shares no arithmetic with the code it judges. A server is a set of byte arrays, one per rank and
page group; a transfer moves real bytes between them, and afterwards every byte of the target must
have been written exactly once with the right content, or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import CacheComponent, Live, LiveKind, Segment, Shard
from common.planner.copy_plan import CopyPlan
from common.planner.pairing import TokenRange

Counts = NDArray[np.uint8]
Bytes = NDArray[np.uint8]
Int64Array = NDArray[np.int64]
PageLists = list[tuple[int, list[int]]]
Planner = Callable[[RankLayout, RankLayout, PageLists, PageLists, TokenRange], CopyPlan]


# ---- what the rules say --------------------------------------------------------------------------


def live_items(live: Live, token_count: int) -> list[int]:
    """Items needed to go on after `token_count` tokens."""
    match live.kind:
        case LiveKind.FULL:
            return list(range(token_count))
        case LiveKind.WINDOW:  # what the token at position `token_count` sees, itself excepted
            return [item for item in range(token_count) if token_count - item < live.size]
        case LiveKind.BLOCK:
            return [item for item in range(token_count) if (item + 1) * live.size <= token_count]
        case LiveKind.TAIL:
            closed = token_count - token_count % live.size
            return [item for item in range(token_count) if item >= closed - live.back]
        case LiveKind.SLOT:
            return [0]


def sent_items(live: Live, tokens: TokenRange) -> list[int]:
    """Items that leave with a range of tokens."""
    if live.kind is LiveKind.FULL:
        return [item for item in range(tokens.stop) if item >= tokens.start]
    if live.kind is LiveKind.BLOCK:
        return [
            item
            for item in range(tokens.stop)
            if tokens.start < (item + 1) * live.size <= tokens.stop
        ]
    return live_items(live, tokens.stop) if tokens.is_final else []


def rows_of_page(live: Live, page_size: int) -> int:
    match live.kind:
        case LiveKind.FULL | LiveKind.WINDOW:
            return page_size
        case LiveKind.BLOCK:
            return page_size // live.size if page_size >= live.size else 1
        case LiveKind.TAIL:
            return live.size + live.back
        case LiveKind.SLOT:
            return 1


def page_of_item(live: Live, page_size: int, item: int) -> int:
    if live.kind in (LiveKind.TAIL, LiveKind.SLOT):
        return 0
    return item // rows_of_page(live, page_size)


def holds_unit(unit: int, unit_count: int, shard: Shard, tp_size: int, tp_rank: int) -> bool:
    if shard is Shard.REPLICATE:
        return True
    if unit_count >= tp_size:
        return unit // (unit_count // tp_size) == tp_rank
    return tp_rank // (tp_size // unit_count) == unit


ELEMENTS = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
NOISE = np.frombuffer(random.Random(0).randbytes(1 << 20), dtype=np.uint8)
# Spreads neighbours over the noise; products of it stay far below 2**63.
NOISE_STEP = 40503


def content(planes: Sequence[Plane], items: Int64Array, nbytes: int) -> Bytes:
    """Noise that differs from element to element: uint8[plane][item][byte]."""
    numbers = [
        ((plane.key[0] * 31 + plane.key[1]) * 1031 + plane.key[2]) * 1033 + plane.key[3]
        for plane in planes
    ]
    elements = np.add.outer(np.array(numbers, dtype=np.int64) * 1009, items)
    starts = elements * NOISE_STEP % (len(NOISE) - nbytes)
    return NOISE[starts[..., np.newaxis] + np.arange(nbytes)]


# ---- where things lie ----------------------------------------------------------------------------


class Plane(NamedTuple):
    """One (component, segment, layer, unit) in a rank's page: where its row 0 lies."""

    key: tuple[int, int, int, int]
    live: Live
    offset: int
    nbytes: int


def lives_of(layout: ServerLayout) -> list[Live]:
    lives: list[Live] = []
    for component in layout.components:
        if component.live not in lives:
            lives.append(component.live)
    return lives


def layer_groups_of(layout: ServerLayout, pp_rank: int) -> list[list[int]]:
    first, end = layout.stages[pp_rank]
    layers = list(range(first, end))
    count = min(layout.layer_group_count, len(layers))
    groups = []
    for remaining in range(count, 0, -1):
        size = -(-len(layers) // remaining)
        groups.append(layers[:size])
        layers = layers[size:]
    return groups


def walk_page(
    layout: ServerLayout, pp_rank: int, tp_rank: int, live: Live
) -> tuple[list[Plane], int]:
    """Every plane of one page of one group in memory order, and the size of the page.

    [layer group][unit class][unit][layer in group][plane][item in page][payload]

    A plane starts at a multiple of its element, a unit at one of the largest in its class, and so
    does what lies behind a class or a page.
    """
    rows = rows_of_page(live, layout.page_size)
    members: list[tuple[int, CacheComponent, int, Segment]] = [
        (component_index, component, segment_index, segment)
        for component_index, component in enumerate(layout.components)
        if component.live == live
        for segment_index, segment in enumerate(component.segments)
    ]
    classes: list[tuple[Shard, int]] = []
    for _, component, _, segment in members:
        if (component.shard, segment.unit_count) not in classes:
            classes.append((component.shard, segment.unit_count))
    planes: list[Plane] = []
    offset = 0

    for layers in layer_groups_of(layout, pp_rank):
        for shard, unit_count in classes:
            owned = [
                (layer, *member)
                for layer in layers
                for member in members
                if (member[1].shard, member[3].unit_count) == (shard, unit_count)
                and layer in member[1].layers
            ]
            largest = max((ELEMENTS[component.dtype] for _, _, component, _, _ in owned), default=1)
            offset = padded(offset, largest)
            for unit in range(unit_count):
                if not holds_unit(unit, unit_count, shard, layout.tp_size, tp_rank):
                    continue
                for layer, component_index, component, segment_index, segment in owned:
                    offset = padded(offset, ELEMENTS[component.dtype])
                    key = (component_index, segment_index, layer, unit)
                    planes.append(Plane(key, live, offset, segment.unit_nbytes))
                    offset += segment.unit_nbytes * rows
                offset = padded(offset, largest)
    return planes, padded(offset, max(ELEMENTS[member[1].dtype] for member in members))


def padded(offset: int, to: int) -> int:
    """The first multiple of `to` from `offset` on."""
    return -(-offset // to) * to


# ---- two servers and a transfer -----------------------------------------------------------------


@dataclass
class Server:
    """Byte arrays of every (rank, group), filled with noise; writes to them are counted.

    pages: per group (first logical page index, page ids) of the one request.
    """

    layout: ServerLayout
    pages: PageLists
    memory: dict[tuple[int, int], bytearray] = field(default_factory=dict)
    writes: dict[tuple[int, int], Counts] = field(default_factory=dict)
    planes: dict[tuple[int, int], list[Plane]] = field(default_factory=dict)
    page_nbytes: dict[tuple[int, int], int] = field(default_factory=dict)
    _pages_of: dict[tuple[int, tuple[int, ...]], Int64Array] = field(default_factory=dict)

    @staticmethod
    def make(
        layout: ServerLayout, pages: PageLists, page_counts: Sequence[int], seed: int
    ) -> Server:
        server = Server(layout, pages)
        noise = np.random.default_rng(seed)
        for rank in range(layout.tp_size * len(layout.stages)):
            pp_rank, tp_rank = divmod(rank, layout.tp_size)
            for group, live in enumerate(lives_of(layout)):
                planes, page_nbytes = walk_page(layout, pp_rank, tp_rank, live)
                nbytes = (page_counts[group] + 1) * page_nbytes
                place = (rank, group)
                server.planes[place] = planes
                server.page_nbytes[place] = page_nbytes
                server.memory[place] = bytearray(noise.bytes(nbytes))
                server.writes[place] = np.zeros(nbytes, dtype=np.uint8)
        return server

    def elements(
        self, rank: int, group: int, items: Sequence[int]
    ) -> Iterator[tuple[Int64Array, Bytes]]:
        """Where every byte of every unit of every item lies on a rank, and what must be there.

        Both flat, one pair of arrays for each size of units.
        """
        rows = rows_of_page(lives_of(self.layout)[group], self.layout.page_size)
        page_nbytes = self.page_nbytes[rank, group]
        page_starts = self.pages_of(group, items) * page_nbytes
        absolute = np.array(items, dtype=np.int64)
        planes_of_size: dict[int, list[Plane]] = {}
        for plane in self.planes[rank, group]:
            planes_of_size.setdefault(plane.nbytes, []).append(plane)
        for nbytes, planes in planes_of_size.items():
            offsets = np.array([plane.offset for plane in planes], dtype=np.int64)
            starts = np.add.outer(offsets, page_starts + absolute % rows * nbytes)
            places = starts[..., np.newaxis] + np.arange(nbytes)
            yield places.ravel(), content(planes, absolute, nbytes).ravel()

    def pages_of(self, group: int, items: Sequence[int]) -> Int64Array:
        """The page id of every item; the same on all ranks."""
        found = self._pages_of.get((group, tuple(items)))
        if found is None:
            live, page_size = lives_of(self.layout)[group], self.layout.page_size
            first, page_ids = self.pages[group]
            ids = [page_ids[page_of_item(live, page_size, item) - first] for item in items]
            found = np.array(ids, dtype=np.int64)
            self._pages_of[group, tuple(items)] = found
        return found

    def start_of(self, rank: int, group: int, plane: Plane, item: int) -> int:
        """Where one element of a plane begins."""
        live, page_size = lives_of(self.layout)[group], self.layout.page_size
        first, page_ids = self.pages[group]
        page = page_ids[page_of_item(live, page_size, item) - first]
        row = item % rows_of_page(live, page_size)
        return page * self.page_nbytes[rank, group] + plane.offset + row * plane.nbytes

    def view(self, rank: int, group: int) -> Bytes:
        return np.frombuffer(self.memory[rank, group], dtype=np.uint8)

    def fill(self, token_count: int) -> None:
        """As after computing the prompt: live items are there on every rank that holds them."""
        for rank, group in self.memory:
            live = lives_of(self.layout)[group]
            memory = self.view(rank, group)
            for places, values in self.elements(rank, group, live_items(live, token_count)):
                memory[places] = values


def transfer(
    source: Server, target: Server, pieces: Sequence[TokenRange], planner: Planner
) -> None:
    """Every source rank sends every piece to every target rank, as bytes."""
    source_ranks, target_ranks = source.layout.ranks, target.layout.ranks
    for source_rank in source_ranks:
        for target_rank in target_ranks:
            for piece in pieces:
                plan = planner(source_rank, target_rank, source.pages, target.pages, piece)
                if plan.run_count:
                    check_form(plan)
                    apply_plan(plan, source, source_rank.index, target, target_rank.index)


def check_form(plan: CopyPlan) -> None:
    """Sorted, disjoint, and nothing left to join; all int64."""
    columns = (
        plan.source_region,
        plan.source_offset,
        plan.target_region,
        plan.target_offset,
        plan.nbytes,
    )
    for column in columns:
        assert column.dtype == np.int64
        assert column.shape == (plan.run_count,)
    assert (plan.nbytes > 0).all()
    region, start, end = plan.target_region, plan.target_offset, plan.target_offset + plan.nbytes
    is_same = region[1:] == region[:-1]
    is_later = (region[1:] > region[:-1]) | (is_same & (start[1:] > start[:-1]))
    assert is_later.all(), "not sorted"
    assert not (is_same & (start[1:] < end[:-1])).any(), "copies overlap"
    source_end = plan.source_offset + plan.nbytes
    joins = (
        is_same
        & (start[1:] == end[:-1])
        & (plan.source_region[1:] == plan.source_region[:-1])
        & (plan.source_offset[1:] == source_end[:-1])
    )
    assert not joins.any(), "not coalesced"


def apply_plan(
    plan: CopyPlan, source: Server, source_rank: int, target: Server, target_rank: int
) -> None:
    """Copies byte by byte and counts; a plan of good form has no byte twice."""
    regions = zip(plan.source_region.tolist(), plan.target_region.tolist(), strict=True)
    for source_region, target_region in sorted(set(regions)):
        chosen = (plan.source_region == source_region) & (plan.target_region == target_region)
        nbytes = plan.nbytes[chosen]
        read = source.view(source_rank, source_region)
        written = target.view(target_rank, target_region)
        read_from = each_byte(plan.source_offset[chosen], nbytes)
        write_to = each_byte(plan.target_offset[chosen], nbytes)
        assert read_from.min() >= 0 and read_from.max() < len(read), "reads out of bounds"
        assert write_to.min() >= 0 and write_to.max() < len(written), "writes out of bounds"
        written[write_to] = read[read_from]
        target.writes[target_rank, target_region][write_to] += 1


def each_byte(starts: Int64Array, nbytes: Int64Array) -> Int64Array:
    """Offsets of all bytes of runs, run by run."""
    ends = np.cumsum(nbytes)
    return np.repeat(starts - (ends - nbytes), nbytes) + np.arange(ends[-1])


def judge(target: Server, pieces: Sequence[TokenRange]) -> None:
    """Raises: AssertionError if a byte was not written exactly as often and as it must be."""
    for rank, group in target.memory:
        live = lives_of(target.layout)[group]
        items = [item for piece in pieces for item in sent_items(live, piece)]
        assert len(items) == len(set(items)), "the case itself sends an item twice"
        writes, memory = target.writes[rank, group], target.view(rank, group)
        wanted = np.zeros(len(memory), dtype=np.uint8)
        element_nbytes = 0
        for places, values in target.elements(rank, group, items):
            wanted[places] = 1
            element_nbytes += len(places)
            assert np.array_equal(memory[places], values), f"rank {rank} group {group}: wrong bytes"
        assert np.count_nonzero(wanted) == element_nbytes, "the case maps two elements to a place"
        assert np.array_equal(writes, wanted), (
            f"rank {rank} group {group}: bytes written {int(writes.sum())} times in all, "
            f"{int(wanted.sum())} wanted; most often {int(writes.max(initial=0))}"
        )

"""Random pairs of servers with a request between them, over everything a layout may be."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st

from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import (
    DTYPE_NBYTES,
    FULL,
    SLOT,
    CacheComponent,
    Live,
    LiveKind,
    Segment,
    Shard,
)
from common.layout.parallel import split_layers
from common.planner.copies import PairPlan
from common.planner.copy_plan import CopyPlan
from common.planner.pairing import TokenRange
from tests.planner.oracle import (
    PageLists,
    Server,
    lives_of,
    page_of_item,
    rows_of_page,
    sent_items,
)

UNIT_COUNT_MAX = 16
# Pairs of ranks are what a case costs; all of tp 1..8 and pp 1..4 fit, not all of both at once.
RANK_COUNT_MAX = 12
TOKEN_COUNT_MAX = 160
SPARE_PAGES_MAX = 4


# Made once: hypothesis looks long at a strategy that it has not seen before. What depends on a case
# is drawn by functions that are given `draw`, for the same reason.
LIVE_RULES = st.one_of(
    st.just(FULL),
    st.just(FULL),
    st.builds(lambda size: Live(LiveKind.WINDOW, size), st.integers(1, 130)),
    st.builds(lambda size: Live(LiveKind.BLOCK, size), st.sampled_from([1, 2, 3, 4, 8, 32, 100])),
    st.builds(
        lambda size, back: Live(LiveKind.TAIL, size, back), st.integers(1, 20), st.integers(0, 6)
    ),
    st.just(SLOT),
)
LIVE_RULE_LISTS = st.lists(LIVE_RULES, min_size=1, max_size=3)
DTYPES = st.sampled_from(["float8_e4m3fn", "float8_e4m3fn", "bfloat16", "float32"])
PAGE_SIZES = st.sampled_from([8, 16, 32, 64])
SHARDS = st.sampled_from(Shard)
SHUFFLES = st.integers(0, 1 << 16)


@dataclass(frozen=True)
class Case:
    """A transfer of `pieces` of one request. page_counts: per group, without the scratch page."""

    source: ServerLayout
    target: ServerLayout
    source_pages: PageLists
    target_pages: PageLists
    source_page_counts: list[int]
    target_page_counts: list[int]
    pieces: list[TokenRange]

    def servers(self) -> tuple[Server, Server]:
        source = Server.make(self.source, self.source_pages, self.source_page_counts, seed=1)
        target = Server.make(self.target, self.target_pages, self.target_page_counts, seed=2)
        source.fill(self.pieces[-1].stop)
        return source, target


class PairPlans:
    """As servers keep them: one for every pair of ranks that transfers anything."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int], PairPlan | None] = {}

    def __call__(
        self,
        source: RankLayout,
        target: RankLayout,
        source_pages: PageLists,
        target_pages: PageLists,
        tokens: TokenRange,
    ) -> CopyPlan:
        pair = (source.index, target.index)
        if pair not in self._plans:
            plan = PairPlan(source, target)
            self._plans[pair] = None if plan.is_empty else plan
        found = self._plans[pair]
        return found.plan(source_pages, target_pages, tokens) if found else CopyPlan.empty()


@st.composite
def cases(draw: st.DrawFn, *, from_start: bool = False, has_prefix: bool = False) -> Case:
    """from_start: nothing was known before, so that the pieces are all of the cache.

    has_prefix: what was known, often something, are whole pages of the target. It names no others.
    """
    layer_count = draw(between(1, 12))
    source_tp, target_tp = draw(between(1, 8)), draw(between(1, 8))
    components = draw_components(draw, layer_count, source_tp, target_tp)
    source = draw_layout(draw, components, source_tp, layer_count)
    target = draw_layout(draw, components, target_tp, layer_count)
    border = border_of(target) if has_prefix else 0
    pieces = draw_pieces(draw, from_start=from_start, border=border)
    source_pages, source_page_counts = draw_pages(draw, source, pieces)
    is_rest = has_prefix and border > 0
    target_pages, target_page_counts = draw_pages(draw, target, pieces, is_rest=is_rest)
    return Case(
        source,
        target,
        source_pages,
        target_pages,
        source_page_counts,
        target_page_counts,
        pieces,
    )


def draw_layout(
    draw: st.DrawFn, components: tuple[CacheComponent, ...], tp_size: int, layer_count: int
) -> ServerLayout:
    stage_max = min(4, layer_count, RANK_COUNT_MAX // tp_size)
    layout = ServerLayout(
        components=components,
        tp_size=tp_size,
        stages=split_layers(layer_count, draw(between(1, stage_max))),
        page_size=draw(PAGE_SIZES),
        layer_group_count=draw(between(1, 3)),
    )
    layout.check()
    return layout


def draw_components(
    draw: st.DrawFn, layer_count: int, source_tp: int, target_tp: int
) -> tuple[CacheComponent, ...]:
    unit_choices = unit_counts(source_tp, target_tp)
    lives = draw(LIVE_RULE_LISTS)
    components = []
    for index in range(draw(between(1, 4))):
        segment_count = draw(between(1, 3))
        dtype = draw(DTYPES)
        segments = tuple(
            Segment(
                f"s{number}",
                draw(unit_choices),
                draw(between(1, 5)) * DTYPE_NBYTES[dtype],
            )
            for number in range(segment_count)
        )
        has_all_layers = draw(st.booleans())
        layers = range(layer_count) if has_all_layers else sorted(draw(layer_sets(layer_count)))
        components.append(
            CacheComponent(
                name=f"c{index}",
                layers=tuple(layers),
                segments=segments,
                live=lives[index % len(lives)],
                shard=draw(SHARDS),
                dtype=dtype,
            )
        )
    return tuple(components)


@cache
def unit_counts(source_tp: int, target_tp: int) -> st.SearchStrategy[int]:
    """Those that both sides can spread over their ranks."""
    return st.sampled_from(
        [
            count
            for count in range(1, UNIT_COUNT_MAX + 1)
            if all(count % tp == 0 or tp % count == 0 for tp in (source_tp, target_tp))
        ]
    )


@cache
def layer_sets(layer_count: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, layer_count - 1), min_size=1)


@cache
def borders_before(stop: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, stop), min_size=1, max_size=3)


@cache
def between(first: int, last: int) -> st.SearchStrategy[int]:
    return st.integers(first, last)


def border_of(layout: ServerLayout) -> int:
    """Tokens after which whole pages end in every group that grows; 0 if none does."""
    tokens = [
        rows_of_page(live, layout.page_size) * max(1, live.size)
        for live in lives_of(layout)
        if live.kind in (LiveKind.FULL, LiveKind.BLOCK)
    ]
    return math.lcm(*tokens) if tokens else 0


def draw_pieces(draw: st.DrawFn, *, from_start: bool = False, border: int = 0) -> list[TokenRange]:
    """Consecutive ranges that end with the final one; the first may start behind a known prefix.

    border: whose multiple the prefix is; 0 if it may be anything.
    """
    stop = draw(between(1, TOKEN_COUNT_MAX))
    borders = sorted(draw(borders_before(stop)))
    if border:
        borders[0] = border * draw(between(0, stop // border))
        borders = [max(borders[0], later) for later in borders]
    elif from_start:
        borders[0] = 0
    ends = [*borders[1:], stop]
    return [
        TokenRange(first, end, is_final=index == len(ends) - 1)
        for index, (first, end) in enumerate(zip(borders, ends, strict=True))
    ]


def draw_pages(
    draw: st.DrawFn, layout: ServerLayout, pieces: list[TokenRange], *, is_rest: bool = False
) -> tuple[PageLists, list[int]]:
    """Pages in random order: those that are needed, and a few around them.

    is_rest: no pages before the pieces.
    """
    lists: PageLists = []
    page_counts: list[int] = []
    for group in layout.groups:
        start, stop = pieces[0].start if is_rest else 0, pieces[-1].stop
        needed = [
            page_of_item(group.live, layout.page_size, item)
            for item in {
                *sent_items(group.live, TokenRange(start, stop, is_final=True)),
                *(item for piece in pieces for item in sent_items(group.live, piece)),
            }
        ]
        first = min(needed, default=0)
        count = max(needed, default=first - 1) + 1 - first
        if group.live.is_paged and not is_rest:
            earlier = draw(between(0, min(first, 2)))
            first, count = first - earlier, count + earlier + draw(between(0, 1))
        page_count = count + draw(between(0, SPARE_PAGES_MAX))
        ids = list(range(1, page_count + 1))
        shuffle = draw(SHUFFLES)
        if shuffle:  # the simplest case is the one in order
            random.Random(shuffle).shuffle(ids)
        lists.append((first, ids[:count]))
        page_counts.append(page_count)
    return lists, page_counts

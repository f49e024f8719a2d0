"""Windows whose page lists differ on the two sides: other lengths, other first pages, spare pages.

A prefill server holds window pages of one chunk beside those of the window, a decode server one for
the next tokens. Only positions count, never places in a list.
"""

from __future__ import annotations

import pytest

from common.errors import PlanMismatch
from common.layout.cache_layout import ServerLayout
from common.layout.families import windowed_gqa_components
from common.layout.parallel import split_layers
from common.planner.copies import plan_copies
from common.planner.pairing import TokenRange
from tests.planner.cases import Case
from tests.planner.oracle import PageLists, judge, transfer

WINDOW = 24
ROW_NBYTES = 2 * 4 * 8 * 4  # keys and values of four heads of eight, in float32
FULL_LAYERS, WINDOW_LAYERS = 1, 3


def windowed(tp: int, pp: int, page_size: int) -> ServerLayout:
    components = windowed_gqa_components(
        windows=(WINDOW, WINDOW, WINDOW, 0), kv_head_count=4, head_dim=8, dtype="float32"
    )
    layout = ServerLayout(components, tp, split_layers(4, pp), page_size)
    layout.check()
    return layout


def lists_of(layout: ServerLayout, token_count: int, *, before: int, behind: int) -> PageLists:
    """Ids in descending order; of the window also pages `before` and `behind` those needed."""
    full, window = layout.groups
    needed = window.page_indices(window.live.items(token_count))
    before = min(before, needed.start)
    window_count = before + len(needed) + behind
    return [
        (0, list(range(full.page_count(token_count), 0, -1))),
        (needed.start - before, list(range(window_count, 0, -1))),
    ]


SOURCES = [windowed(2, 1, 8), windowed(1, 2, 64), windowed(1, 1, 16)]
TARGETS = [windowed(1, 2, 4), windowed(4, 1, 32), windowed(2, 1, 16)]


@pytest.mark.parametrize("target", TARGETS, ids=["pp2 page4", "tp4 page32", "tp2 page16"])
@pytest.mark.parametrize("source", SOURCES, ids=["tp2 page8", "pp2 page64", "tp1 page16"])
@pytest.mark.parametrize("token_count", [5, 23, 24, 25, 64, 300])
def test_only_the_window_is_copied_whatever_pages_either_side_holds(
    source: ServerLayout, target: ServerLayout, token_count: int
) -> None:
    source_pages = lists_of(source, token_count, before=64 // source.page_size, behind=0)
    target_pages = lists_of(target, token_count, before=0, behind=1)
    pieces = [
        TokenRange(first, min(first + 64, token_count), is_final=first + 64 >= token_count)
        for first in range(0, token_count, 64)
    ]
    counts = [[len(ids) for _, ids in lists] for lists in (source_pages, target_pages)]
    case = Case(source, target, source_pages, target_pages, counts[0], counts[1], pieces)
    source_side, target_side = case.servers()
    transfer(source_side, target_side, pieces, plan_copies)
    judge(target_side, pieces)
    moved_nbytes = sum(
        plan_copies(here, there, source_pages, target_pages, piece).total_nbytes
        for here in source.ranks
        for there in target.ranks
        for piece in pieces
    )
    rows = FULL_LAYERS * token_count + WINDOW_LAYERS * min(token_count, WINDOW - 1)
    assert moved_nbytes == rows * ROW_NBYTES


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_window_that_moved_on_is_not_copied_from_other_positions(side: str) -> None:
    """The pages are as many as are needed, but begin one later."""
    source, target = windowed(1, 1, 8), windowed(1, 1, 16)
    lists = {
        "source": lists_of(source, 300, before=0, behind=0),
        "target": lists_of(target, 300, before=0, behind=0),
    }
    first, ids = lists[side][1]
    lists[side][1] = (first + 1, ids)
    with pytest.raises(PlanMismatch, match=f"{side} pages {first + 1}"):
        plan_copies(
            source.ranks[0],
            target.ranks[0],
            lists["source"],
            lists["target"],
            TokenRange(0, 300, is_final=True),
        )

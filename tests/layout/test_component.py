"""Live rules: which items a request needs, against their definition."""

from __future__ import annotations

import pytest

from common.layout.component import FULL, SLOT, Live, LiveKind
from tests.planner.oracle import live_items


@pytest.mark.parametrize(
    "live",
    [FULL, SLOT]
    + [Live(LiveKind.WINDOW, size) for size in (1, 2, 7, 128)]
    + [Live(LiveKind.BLOCK, size) for size in (1, 4, 128)]
    + [Live(LiveKind.TAIL, size, back) for size in (1, 4, 128) for back in (0, 4)],
)
def test_live_items_agree_with_their_definition(live: Live) -> None:
    for token_count in range(300):
        assert list(live.items(token_count)) == live_items(live, token_count), token_count


def test_a_window_holds_what_the_next_token_sees() -> None:
    assert Live(LiveKind.WINDOW, 128).items(1000) == range(873, 1000)


def test_a_closed_block_leaves_only_the_back_part_of_the_tail() -> None:
    assert Live(LiveKind.BLOCK, 4).items(1000) == range(250)
    assert Live(LiveKind.TAIL, 4, 4).items(1000) == range(996, 1000)
    assert Live(LiveKind.TAIL, 4, 4).items(1001) == range(996, 1001)
    assert Live(LiveKind.TAIL, 128).items(1000) == range(896, 1000)
    assert Live(LiveKind.TAIL, 128).items(1024) == range(1024, 1024)


def test_a_tail_never_has_more_rows_than_its_page() -> None:
    for size in range(1, 9):
        for back in range(5):
            live = Live(LiveKind.TAIL, size, back)
            assert max(len(live.items(count)) for count in range(60)) == size - 1 + back


@pytest.mark.parametrize("kind", list(LiveKind))
def test_only_full_and_block_leave_early(kind: LiveKind) -> None:
    assert Live(kind, 4).is_streamable == (kind in (LiveKind.FULL, LiveKind.BLOCK))
    assert Live(kind, 4).is_paged == (kind not in (LiveKind.TAIL, LiveKind.SLOT))

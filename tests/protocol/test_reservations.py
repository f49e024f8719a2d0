"""A reservation that passes can be planned for, and what is wrong with others is said."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.layout.cache_layout import ServerLayout
from common.layout.component import SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.layout.families import windowed_gqa_components
from common.planner.copies import plan_copies
from common.planner.pairing import TokenRange
from common.protocol.handshake import (
    check_transfer_request,
    expected_writers,
)
from common.protocol.peer import TransferRequest
from common.request import SamplingParams
from tests.planner.cases import Case, cases
from tests.protocol.layouts import gqa, with_component


def reserve(
    source: ServerLayout, target: ServerLayout, token_count: int, token_start: int = 0
) -> TransferRequest:
    """An honest reservation of the pages 1, 2, 3, ... of every group.

    token_start: all of the pages before it are there.
    """
    indices = [
        range(token_start // group.page_tokens, group.page_end(token_count))
        if group.live.is_streamable
        else group.page_indices(group.live.items(token_count))
        for group in target.groups
    ]
    return TransferRequest(
        transfer_id=1,
        incarnation="d",
        peer_incarnation="p",
        token_count=token_count,
        pages=[(needed.start, list(range(1, len(needed) + 1))) for needed in indices],
        budget_ms=1000,
        writers=expected_writers(source, target),
        token_ids=[7] * token_count,
        prompt_count=token_count,
        sampling=SamplingParams(max_new_tokens=1, seed=0),
        token_start=token_start,
    )


WINDOW = Live(LiveKind.WINDOW, 10)
SOURCE, TARGET = gqa(2), with_component(gqa(4, page_size=8), WINDOW)
SOURCE_OF_BLOCKS = with_component(with_component(gqa(2), Live(LiveKind.BLOCK, 3)), WINDOW)
COUNTS = (10, 3)


def complaint_about(**fields: object) -> str | None:
    request = msgspec.structs.replace(reserve(SOURCE, TARGET, 40), **fields)
    return check_transfer_request(SOURCE, TARGET, COUNTS, request)


def test_an_honest_reservation_passes() -> None:
    assert complaint_about() is None
    assert complaint_about(room=5, token_ids=[], prompt_count=0, sampling=None) is None
    assert complaint_about(prompt_count=1) is None
    assert complaint_about(pages=[(0, [10, 9, 1, 2, 3]), (3, [3, 2])]) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"token_count": 0}, "token_count=0: must be at least 1"),
        ({"token_count": 41}, "40 token ids for token_count=41"),
        ({"token_ids": []}, "0 token ids for token_count=40"),
        ({"prompt_count": 0}, "prompt_count=0: must be in 1..40"),
        ({"prompt_count": 41}, "prompt_count=41: must be in 1..40"),
        ({"sampling": None}, "sampling: must be given where no room is"),
        ({"is_held": True}, "is_held: must be false where no room is"),
        (
            {
                "sampling": SamplingParams(
                    1, 0, return_logprob=True, top_logprobs_num=2**31 - 1, logprob_start_len=0
                )
            },
            "log-probabilities of 40 prompt tokens may take 1288490189640 bytes: at most 50331648 "
            "can be sent",
        ),
        ({"writers": []}, "writers=[]: must be [0, 1]"),
        ({"writers": [0]}, "writers=[0]: must be [0, 1]"),
        ({"writers": [0, 1, 2]}, "writers=[0, 1, 2]: must be [0, 1]"),
        ({"writers": [0, 0]}, "writers=[0, 0]: must be [0, 1]"),
        ({"pages": []}, "pages of 0 page groups: there are 2"),
        ({"pages": [(0, [1, 2, 3, 4, 5])] * 3}, "pages of 3 page groups: there are 2"),
        (
            {"pages": [(0, [1, 2, 3, 4]), (3, [1, 2])]},
            "pages of group 0: 4 from index 0; 40 tokens need 5 from index 0",
        ),
        (
            {"pages": [(0, [1, 2, 3, 4, 5, 6]), (3, [1, 2])]},
            "pages of group 0: 6 from index 0; 40 tokens need 5 from index 0",
        ),
        (
            {"pages": [(1, [1, 2, 3, 4, 5]), (3, [1, 2])]},
            "pages of group 0: 5 from index 1; 40 tokens need 5 from index 0",
        ),
        (
            {"pages": [(0, [1, 2, 3, 4, 5]), (0, [1, 2])]},
            "pages of group 1: 2 from index 0; 40 tokens need 2 from index 3",
        ),
        (
            {"pages": [(0, [1, 2, 0, 4, 5]), (3, [1, 2])]},
            "pages of group 0: page 0: must be in 1..10",
        ),
        (
            {"pages": [(0, [1, 2, 11, 4, 5]), (3, [1, 2])]},
            "pages of group 0: page 11: must be in 1..10",
        ),
        (
            {"pages": [(0, [1, 2, 3, 4, 5]), (3, [4, 2])]},
            "pages of group 1: page 4: must be in 1..3",
        ),
        (
            {"pages": [(0, [1, 2, 3, 2, 5]), (3, [1, 2])]},
            "pages of group 0: page 2 is named twice",
        ),
        (
            {"pages": [(0, [1, 2, 3, 4, -5]), (3, [1, 2])]},
            "pages of group 0: page -5: must be in 1..10",
        ),
    ],
)
def test_a_wrong_reservation_is_refused_with_the_reason(
    fields: dict[str, object], complaint: str
) -> None:
    assert complaint_about(**fields) == complaint


# ---- behind a prefix -----------------------------------------------------------------------------

# Pages of 8 tokens, of blocks of 3 that are pages of 6, and a window.
GROWING = with_component(with_component(gqa(4, page_size=8), Live(LiveKind.BLOCK, 3)), WINDOW)


@pytest.mark.parametrize("token_start", [0, 24, 48])
def test_a_reservation_behind_whole_pages_of_every_group_passes(token_start: int) -> None:
    """All that grows may be there already: windows come in any case."""
    request = reserve(SOURCE_OF_BLOCKS, GROWING, 48, token_start)
    first_full, first_block, first_window = (first for first, _ in request.pages)
    assert (first_full, first_block, first_window) == (token_start // 8, token_start // 6, 4)
    for digests in (b"", bytes(16 * 4)):
        found = msgspec.structs.replace(request, prefix_digests=digests)
        assert check_transfer_request(SOURCE_OF_BLOCKS, GROWING, (6, 8, 2), found) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"token_start": -24}, "token_start=-24: must be in 0..48"),
        ({"token_start": 72}, "token_start=72: must be in 0..48"),
        (
            {"token_start": 18},
            "token_start=18: must be a multiple of 8, the tokens of a page of group 0",
        ),
        (
            {"token_start": 8},
            "token_start=8: must be a multiple of 6, the tokens of a page of group 1",
        ),
        (
            {"prefix_digests": bytes(16)},
            "prefix_digests of 16 bytes: must be 0, or 64 for 48 tokens",
        ),
        (
            {"prefix_digests": bytes(80)},
            "prefix_digests of 80 bytes: must be 0, or 64 for 48 tokens",
        ),
        (
            {"prefix_digests": bytes(63)},
            "prefix_digests of 63 bytes: must be 0, or 64 for 48 tokens",
        ),
        (
            {"token_start": 0},
            "pages of group 0: 3 from index 3; 48 tokens need 6 from index 0",
        ),
        (
            {"pages": [(0, [1, 2, 3]), (4, [1, 2, 3, 4]), (4, [1, 2])]},
            "pages of group 0: 3 from index 0; 48 tokens behind 24 need 3 from index 3",
        ),
        (
            {"pages": [(3, [1, 2, 3]), (0, [1, 2, 3, 4, 5, 6, 7, 8]), (4, [1, 2])]},
            "pages of group 1: 8 from index 0; 48 tokens behind 24 need 4 from index 4",
        ),
        (
            {"pages": [(3, [1, 2, 3]), (4, [1, 2, 3, 4]), (5, [1])]},
            "pages of group 2: 1 from index 5; 48 tokens behind 24 need 2 from index 4",
        ),
        (
            {"token_start": 48, "pages": [(6, [1]), (8, []), (4, [1, 2])]},
            "pages of group 0: 1 from index 6; 48 tokens behind 48 need 0 from index 6",
        ),
    ],
)
def test_a_wrong_prefix_is_refused_with_the_reason(
    fields: dict[str, object], complaint: str
) -> None:
    request = msgspec.structs.replace(reserve(SOURCE_OF_BLOCKS, GROWING, 48, 24), **fields)
    assert check_transfer_request(SOURCE_OF_BLOCKS, GROWING, (6, 8, 2), request) == complaint


def test_digests_of_a_prompt_that_comes_by_room_are_checked_as_well() -> None:
    complaint = complaint_about(room=5, token_ids=[], prefix_digests=bytes(16))
    assert complaint == "prefix_digests of 16 bytes: must be 0, or 48 for 40 tokens"


def test_where_nothing_grows_no_prefix_is_left_out() -> None:
    component = CacheComponent("c", (0,), (Segment("s", 1, 4),), SLOT, Shard.REPLICATE, "float32")
    layout = ServerLayout((component,), 1, ((0, 1),), 8)
    request = reserve(layout, layout, 16)
    assert check_transfer_request(layout, layout, (4,), request) is None
    request = msgspec.structs.replace(request, token_start=8)
    complaint = check_transfer_request(layout, layout, (4,), request)
    assert complaint == "token_start=8: must be 0 where no cache grows with every token"


# ---- windows, and any layouts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        # The list that the prefill server has for the same window, whose pages are half as large.
        ({"window": (34, [1, 2, 3, 4])}, "4 from index 34; 300 tokens need 2 from index 17"),
        ({"window": (17, [1, 2, 3])}, "3 from index 17; 300 tokens need 2 from index 17"),
        ({"window": (17, [1])}, "1 from index 17; 300 tokens need 2 from index 17"),
        ({"window": (16, [1, 2])}, "2 from index 16; 300 tokens need 2 from index 17"),
        ({"window": (0, list(range(1, 20)))}, "19 from index 0; 300 tokens need 2 from index 17"),
        ({"window": (17, [])}, "0 from index 17; 300 tokens need 2 from index 17"),
        # Fewer tokens, as many full pages, and a window that begins in the page before.
        ({"token_count": 293}, "2 from index 17; 293 tokens need 3 from index 16"),
    ],
)
def test_a_forged_window_is_refused(fields: dict[str, object], complaint: str) -> None:
    def layout(page_size: int) -> ServerLayout:
        components = windowed_gqa_components(
            windows=(24, 0), kv_head_count=2, head_dim=8, dtype="bfloat16"
        )
        return ServerLayout(components, 1, ((0, 2),), page_size)

    source, target = layout(8), layout(16)
    honest = msgspec.structs.replace(reserve(source, target, 300), room=5, token_ids=[])
    assert check_transfer_request(source, target, [100, 100], honest) is None
    full, window = honest.pages
    forged = msgspec.structs.replace(
        honest,
        token_count=fields.get("token_count", 300),
        pages=[full, fields.get("window", window)],
    )
    found = check_transfer_request(source, target, [100, 100], forged)
    assert found == f"pages of group 1: {complaint}"


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases(has_prefix=True), st.data())
def test_a_reservation_that_passes_can_be_planned_for(case: Case, data: st.DataObject) -> None:
    """Honest, or with a page list and the start changed: either refused, or no plan raises."""
    token_start, token_count = case.pieces[0].start, case.pieces[-1].stop
    if not any(group.live.is_streamable for group in case.target.groups):
        token_start = 0
    request = reserve(case.source, case.target, token_count, token_start)
    page_counts = [max(1, len(ids)) for _, ids in request.pages]
    assert check_transfer_request(case.source, case.target, page_counts, request) is None

    group = data.draw(st.integers(0, len(request.pages) - 1))
    changed = data.draw(
        st.tuples(st.integers(-1, 4), st.lists(st.integers(-1, 8), max_size=8, unique=True))
    )
    pages = [*request.pages[:group], changed, *request.pages[group + 1 :]]
    starts = st.one_of(st.just(token_start), st.integers(-1, token_count + 1))
    mutated = msgspec.structs.replace(request, pages=pages, token_start=data.draw(starts))
    if check_transfer_request(case.source, case.target, page_counts, mutated) is None:
        source_pages = [
            (needed.start, list(range(1, len(needed) + 1)))
            for g in case.source.groups
            for needed in [g.page_indices(g.live.items(token_count))]
        ]
        plan_copies(
            case.source.ranks[0],
            case.target.ranks[0],
            source_pages,
            mutated.pages,
            TokenRange(mutated.token_start, token_count, is_final=True),
        )

"""A reservation that passes can be planned for, and what is wrong with others is said."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.layout.cache_layout import ServerLayout
from common.layout.component import Live, LiveKind
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


def reserve(source: ServerLayout, target: ServerLayout, token_count: int) -> TransferRequest:
    """An honest reservation of the pages 1, 2, 3, ... of every group."""
    indices = [group.page_indices(group.live.items(token_count)) for group in target.groups]
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
    )


SOURCE, TARGET = gqa(2), with_component(gqa(4, page_size=8), Live(LiveKind.WINDOW, 10))
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
            "log-probabilities of 40 prompt tokens may take 1288490189440 bytes: at most 50331648 "
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
@given(cases(), st.data())
def test_a_reservation_that_passes_can_be_planned_for(case: Case, data: st.DataObject) -> None:
    """Honest, or with one page list changed: either refused, or no plan raises."""
    token_count = case.pieces[-1].stop
    request = reserve(case.source, case.target, token_count)
    page_counts = [max(1, len(ids)) for _, ids in request.pages]
    assert check_transfer_request(case.source, case.target, page_counts, request) is None

    group = data.draw(st.integers(0, len(request.pages) - 1))
    changed = data.draw(
        st.tuples(st.integers(-1, 4), st.lists(st.integers(-1, 8), max_size=8, unique=True))
    )
    pages = [*request.pages[:group], changed, *request.pages[group + 1 :]]
    mutated = msgspec.structs.replace(request, pages=pages)
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
            TokenRange(0, token_count, is_final=True),
        )

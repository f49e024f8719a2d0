"""What the decode side reserves for windows is what the prefill side takes, and nothing else is."""

from __future__ import annotations

import msgspec
import pytest

from common.layout.cache_layout import ServerLayout
from common.layout.families import windowed_gqa_components
from common.protocol.handshake import check_transfer_request
from common.protocol.peer import TransferRequest
from common.request import SamplingParams
from common.scheduling.page_account import PageAccount

WINDOW = 24
COUNTS = (200, 60)


def layout_of(page_size: int) -> ServerLayout:
    components = windowed_gqa_components(
        windows=(WINDOW, 0), kv_head_count=2, head_dim=4, dtype="float32"
    )
    return ServerLayout(components, 1, ((0, 2),), page_size)


def reserve(token_count: int, page_size: int) -> TransferRequest:
    """As admission does."""
    layout = layout_of(page_size)
    account = PageAccount(layout.groups, COUNTS, has_prefix_cache=False)
    spans = account.spans_for_prompt(token_count)
    for span, pages in zip(spans, account.allocate(account.needs(spans, token_count)), strict=True):
        span.page_ids.extend(pages)
    return TransferRequest(
        transfer_id=1,
        incarnation="decode",
        peer_incarnation="prefill",
        token_count=token_count,
        pages=[(span.first_index, span.page_ids) for span in spans],
        budget_ms=1000,
        writers=[0],
        room=None,
        token_ids=[5] * token_count,
        prompt_count=token_count,
        sampling=SamplingParams(max_new_tokens=1, seed=0),
    )


def why_refused(request: TransferRequest, page_size: int) -> str | None:
    return check_transfer_request(layout_of(64), layout_of(page_size), COUNTS, request)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("token_count", [1, 2, 22, 23, 24, 25, 47, 48, 63, 64, 65, 130])
def test_a_reservation_is_taken_by_a_peer_of_other_pages(token_count: int, page_size: int) -> None:
    assert why_refused(reserve(token_count, page_size), page_size) is None


@pytest.mark.parametrize("forged", [24, 65, 129, 131, 300])
def test_a_forged_length_is_refused(forged: int) -> None:
    """Its window would lie at other positions than the pages that were reserved."""
    honest = reserve(130, 1)
    forgery = msgspec.structs.replace(
        honest, token_count=forged, token_ids=[5] * forged, prompt_count=forged
    )
    problem = why_refused(forgery, 1)
    assert problem is not None and f"{forged} tokens need" in problem


@pytest.mark.parametrize("shift", [-1, 1])
def test_window_pages_at_other_positions_are_refused(shift: int) -> None:
    honest = reserve(130, 4)
    full, (first_index, page_ids) = honest.pages
    assert first_index == (130 - WINDOW + 1) // 4
    moved = msgspec.structs.replace(honest, pages=[full, (first_index + shift, page_ids)])
    problem = why_refused(moved, 4)
    assert problem is not None and "pages of group 1" in problem
    longer = msgspec.structs.replace(honest, pages=[full, (first_index, [*page_ids, 50])])
    assert why_refused(longer, 4) is not None
    shorter = msgspec.structs.replace(honest, pages=[full, (first_index, page_ids[:-1])])
    assert why_refused(shorter, 4) is not None

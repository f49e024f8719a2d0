"""Slots, tails and blocks in the scheduling: what is reserved, held, counted and given back."""

from __future__ import annotations

import msgspec
import pytest

from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.protocol.handshake import check_transfer_request, expected_writers
from common.protocol.peer import TransferRequest
from common.request import SamplingParams
from common.scheduling.page_account import PageAccount

LIVES = (
    SLOT,
    FULL,
    Live(LiveKind.TAIL, 4, 4),
    Live(LiveKind.TAIL, 6),
    Live(LiveKind.BLOCK, 4),
    Live(LiveKind.BLOCK, 24),
)
COUNTS = (2, 300, 3, 3, 80, 20)
SAMPLING = SamplingParams(max_new_tokens=1, seed=0)


def layout_of(page_size: int, lives: tuple[Live, ...] = LIVES) -> ServerLayout:
    components = tuple(
        CacheComponent(f"c{i}", (i,), (Segment("head", 1, 8),), live, Shard.SPLIT, "float32")
        for i, live in enumerate(lives)
    )
    layout = ServerLayout(components, 1, ((0, len(lives)),), page_size)
    layout.check()
    return layout


def account_of(page_size: int) -> PageAccount:
    return PageAccount(layout_of(page_size).groups, COUNTS, has_prefix_cache=True)


def reserve(token_count: int, page_size: int) -> TransferRequest:
    """As admission does."""
    account = account_of(page_size)
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
        sampling=SAMPLING,
    )


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a_reservation_is_taken_by_a_peer_of_other_pages(page_size: int) -> None:
    for token_count in [*range(1, 60), 95, 96, 97]:
        request = reserve(token_count, page_size)
        why = check_transfer_request(layout_of(16), layout_of(page_size), COUNTS, request)
        assert why is None, token_count
        assert request.pages[0] == (0, [1]) and len(request.pages[2][1]) == 1
        assert len(request.pages[4][1]) * max(1, page_size // 4) * 4 >= token_count // 4 * 4


def test_a_second_slot_of_one_request_is_refused() -> None:
    honest = reserve(130, 16)
    forged = msgspec.structs.replace(honest, pages=[(0, [1, 2]), *honest.pages[1:]])
    why = check_transfer_request(layout_of(16), layout_of(16), COUNTS, forged)
    assert why is not None and why.startswith("pages of group 0: 2 from index 0")


def test_who_finds_no_slot_waits_until_one_is_given_back() -> None:
    account = account_of(16)
    first, second = (account.open(i, [1] * 20, 20, SAMPLING) for i in (1, 2))
    assert first is not None and second is not None
    assert first.spans[0].page_ids != second.spans[0].page_ids
    assert account.open(3, [1], 1, SAMPLING) is None
    assert account.pool.used_count(1) == 4, "nothing of the others is kept for who waits"
    account.close(first)
    third = account.open(3, [1], 1, SAMPLING)
    assert third is not None and third.spans[0].page_ids == [1]
    for sequence in (second, third):
        account.close(sequence)
    assert [account.pool.used_count(group) for group in range(len(LIVES))] == [0] * len(LIVES)


def test_a_sequence_that_grows_keeps_its_slot_and_tails_and_takes_blocks_as_they_close() -> None:
    account = account_of(16)
    sequence = account.open(1, [1] * 15, 15, SAMPLING)
    assert sequence is not None
    for token_count in range(16, 400):
        sequence.token_ids.append(1)
        assert account.grow(sequence, token_count)
        for group, span in zip(account.groups, sequence.spans, strict=True):
            assert len(span.page_ids) == group.page_end(token_count)
    assert [len(span.page_ids) for span in sequence.spans] == [1, 25, 1, 1, 25, 16]


def test_a_stage_that_caches_nothing_is_no_writer() -> None:
    components = layout_of(16).components
    stages = ((0, 1), (1, 6), (6, 8))
    source = ServerLayout(components, 2, stages, 16)
    target = ServerLayout(components, 1, ((0, 8),), 16)
    assert expected_writers(source, target) == [0, 1, 2, 3], "slots alone make a writer"

"""The batch that a forward pass computes: where its tokens stand and which pages receive them."""

from __future__ import annotations

import pytest
import torch

from common.engine.forward_batch import ForwardBatch, HostRows, SequenceChunk
from common.layout.cache_layout import PageGroup
from common.layout.component import FULL, SLOT, Live, LiveKind

GROUPS = (PageGroup(FULL, 4, ()),)
CHUNKS = [
    SequenceChunk([11, 12, 13], 0, ([5],), (2,)),
    SequenceChunk([21], 4, ([9, 3],), (0,)),
    SequenceChunk([31, 32, 33], 6, ([2, 8, 1],), (0, 1)),
]


def build(chunks: list[SequenceChunk]) -> ForwardBatch:
    return ForwardBatch.build(chunks, groups=GROUPS, device="cpu")


def test_tokens_of_all_sequences_lie_one_after_the_other() -> None:
    batch = build(CHUNKS)
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 31, 32, 33]
    assert batch.positions.tolist() == [0, 1, 2, 4, 6, 7, 8]
    assert batch.query_starts.tolist() == [0, 3, 4, 7]
    assert batch.query_lengths == (3, 1, 3)
    assert batch.starts.tolist() == [0, 4, 6] == list(batch.start_list)
    assert batch.kv_lengths.tolist() == [3, 5, 9] == list(batch.kv_length_list)
    assert batch.page_tables[0].tolist() == [[5, 0, 0], [9, 3, 0], [2, 8, 1]]
    assert batch.logits_rows is not None
    assert batch.logits_rows.tolist() == [2, 3, 4, 5]
    assert (batch.token_count, batch.sequence_count) == (7, 3)


def test_every_token_goes_to_the_page_and_row_of_its_position() -> None:
    batch = build(CHUNKS)
    assert batch.token_pages[0].tolist() == [5, 5, 5, 3, 8, 8, 1]
    assert batch.token_rows[0].tolist() == [0, 1, 2, 0, 2, 3, 0]


def test_groups_of_different_page_sizes_have_their_own_places() -> None:
    chunk = SequenceChunk([1, 2, 3], 3, ([5, 6], [7, 8, 9]), ())
    groups = (PageGroup(FULL, 4, ()), PageGroup(Live(LiveKind.WINDOW, 2), 2, ()))
    batch = ForwardBatch.build([chunk], groups=groups, device="cpu")
    assert batch.token_pages[0].tolist() == [5, 6, 6]
    assert batch.token_pages[1].tolist() == [8, 9, 9]
    assert batch.token_rows[1].tolist() == [1, 0, 1]
    assert batch.logits_rows is not None
    assert batch.logits_rows.shape == (0,)


def test_decode_only_is_every_sequence_with_one_token() -> None:
    assert build([CHUNKS[1], SequenceChunk([41], 0, ([6],))]).is_decode_only
    assert not build(CHUNKS).is_decode_only


def test_prepared_tensors_give_the_same_batch() -> None:
    expected = build(CHUNKS)
    actual = ForwardBatch.from_tensors(
        token_ids=expected.token_ids,
        positions=expected.positions,
        query_lengths=[3, 1, 3],
        kv_lengths=[3, 5, 9],
        # Wider than needed, as a table that is kept between steps would be.
        page_tables=[torch.nn.functional.pad(expected.page_tables[0], (0, 5))],
        groups=GROUPS,
        logits_rows=expected.logits_rows,
    )
    assert torch.equal(actual.query_starts, expected.query_starts)
    assert torch.equal(actual.starts, expected.starts)
    assert torch.equal(actual.kv_lengths, expected.kv_lengths)
    assert actual.kv_length_list == expected.kv_length_list
    assert torch.equal(actual.token_pages[0], expected.token_pages[0])
    assert torch.equal(actual.token_rows[0], expected.token_rows[0])


@pytest.mark.parametrize(("size", "back"), [(4, 4), (3, 0), (1, 2)])
def test_a_tail_keeps_the_last_token_of_every_row(size: int, back: int) -> None:
    """At every residue, chunks shorter and longer than the ring against writing token by token."""
    group = PageGroup(Live(LiveKind.TAIL, size, back), size + back, ())
    for start in range(2 * group.page_items):
        for count in range(1, 2 * group.page_items + 2):
            chunks = [
                SequenceChunk([0] * count, start, ([9],)),
                SequenceChunk([0] * 2, start + 1, ([4],)),
            ]
            batch = ForwardBatch.build(chunks, groups=(group,), device="cpu")
            assert batch.page_tables[0].tolist() == [[9], [4]]
            written: dict[tuple[int, int], int] = {}
            pages, rows = batch.token_pages[0].tolist(), batch.token_rows[0].tolist()
            for position, page, row in zip(batch.positions.tolist(), pages, rows, strict=True):
                assert page == 0 or (page, row) not in written, "two tokens race for a row"
                if page:
                    written[page, row] = position
            expected = {
                (page, position % group.page_items): position
                for chunk, page in zip(chunks, (9, 4), strict=True)
                for position in range(chunk.start, chunk.start + len(chunk.token_ids))
            }
            assert written == expected


@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_tables_of_blocks_cover_those_that_are_closed(size: int) -> None:
    group = PageGroup(Live(LiveKind.BLOCK, size), 2, ())
    for token_count in range(1, 6 * size):
        page_count = -(-(token_count // size) // 2)
        pages = list(range(1, page_count + 1))
        chunk = SequenceChunk([0] * token_count, 0, (pages,))
        batch = ForwardBatch.build([chunk], groups=(group,), device="cpu")
        assert batch.page_tables[0].tolist() == [pages]
        assert batch.token_pages[0].shape == batch.token_rows[0].shape == (0,)
        if pages:
            with pytest.raises(AssertionError):
                short = SequenceChunk([0] * token_count, 0, (pages[:-1],))
                ForwardBatch.build([short], groups=(group,), device="cpu")


def test_a_slot_is_one_page_and_no_place_for_a_token() -> None:
    groups = (*GROUPS, PageGroup(SLOT, 1, ()))
    chunks = [SequenceChunk([1] * 3, 0, ([5], [2])), SequenceChunk([1], 4, ([9, 3], [7]))]
    batch = ForwardBatch.build(chunks, groups=groups, device="cpu")
    assert batch.page_tables[1].dtype == torch.int32
    assert batch.page_tables[1].tolist() == [[2], [7]]
    assert batch.token_pages[1].shape == batch.token_rows[1].shape == (0,)
    for slots in ([], [1, 2]):
        with pytest.raises(AssertionError):
            chunk = SequenceChunk([1], 0, ([5], slots))
            ForwardBatch.build([chunk], groups=groups, device="cpu")


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([], id="no sequence"),
        pytest.param([SequenceChunk([1] * 5, 0, ([3],))], id="too few pages"),
        pytest.param([SequenceChunk([1], 4, ([3],))], id="too few pages for the cache"),
        pytest.param([SequenceChunk([1, 2], 0, ([3],), (2,))], id="logits of no token"),
        pytest.param([SequenceChunk([1, 2], 0, ([3],), (-1,))], id="negative offset"),
    ],
)
def test_impossible_batches_are_bugs(chunks: list[SequenceChunk]) -> None:
    with pytest.raises(AssertionError):
        build(chunks)


ALL_KINDS = (
    PageGroup(FULL, 4, ()),
    PageGroup(Live(LiveKind.WINDOW, 6), 2, ()),
    PageGroup(Live(LiveKind.TAIL, 3, 1), 3, ()),
    PageGroup(SLOT, 1, ()),
    PageGroup(Live(LiveKind.BLOCK, 3), 2, ()),
)


@pytest.mark.parametrize("group", range(len(ALL_KINDS)))
def test_the_host_finds_the_places_that_the_device_finds(group: int) -> None:
    chunks = [
        SequenceChunk(
            [7],
            length - 1,
            [list(range(first, first + g.page_end(length))) for g in ALL_KINDS],
        )
        for first, length in ((1, 1), (20, 4), (40, 5), (60, 12), (80, 13))
    ]
    batch = ForwardBatch.build(chunks, groups=ALL_KINDS, device="cpu")
    pages, rows = HostRows.of(batch).places(group, ALL_KINDS[group])
    assert pages.tolist() == batch.token_pages[group].tolist()
    assert rows.tolist() == batch.token_rows[group].tolist()


def test_rows_are_filled_up_with_sequences_on_the_scratch_page() -> None:
    rows = HostRows.of(build([SequenceChunk([1], 3, ([5],)), SequenceChunk([2], 1, ([6],))]))
    filled = rows.filled(4, 6, GROUPS)
    assert filled.lengths.tolist() == [4, 2, 6, 6]
    assert filled.page_tables[0].tolist() == [[5, 0], [6, 0], [0, 0], [0, 0]]
    assert filled.places(0, GROUPS[0])[0].tolist() == [5, 6, 0, 0]
    assert filled.first(2).lengths.tolist() == rows.lengths.tolist()

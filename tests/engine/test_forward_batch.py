"""The batch that a forward pass computes: where its tokens stand and which pages receive them."""

from __future__ import annotations

import pytest
import torch

from common.engine.forward_batch import ForwardBatch, SequenceChunk

CHUNKS = [
    SequenceChunk([11, 12, 13], 0, ([5],), (2,)),
    SequenceChunk([21], 4, ([9, 3],), (0,)),
    SequenceChunk([31, 32, 33], 6, ([2, 8, 1],), (0, 1)),
]


def build(chunks: list[SequenceChunk]) -> ForwardBatch:
    return ForwardBatch.build(chunks, page_items=(4,), device="cpu")


def test_tokens_of_all_sequences_lie_one_after_the_other() -> None:
    batch = build(CHUNKS)
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 31, 32, 33]
    assert batch.positions.tolist() == [0, 1, 2, 4, 6, 7, 8]
    assert batch.query_starts.tolist() == [0, 3, 4, 7]
    assert batch.query_lengths == (3, 1, 3)
    assert batch.kv_lengths.tolist() == [3, 5, 9] == list(batch.kv_length_list)
    assert batch.page_tables[0].tolist() == [[5, 0, 0], [9, 3, 0], [2, 8, 1]]
    assert batch.logits_rows.tolist() == [2, 3, 4, 5]
    assert (batch.token_count, batch.sequence_count) == (7, 3)


def test_every_token_goes_to_the_page_and_row_of_its_position() -> None:
    batch = build(CHUNKS)
    assert batch.token_pages[0].tolist() == [5, 5, 5, 3, 8, 8, 1]
    assert batch.token_rows[0].tolist() == [0, 1, 2, 0, 2, 3, 0]


def test_groups_of_different_page_sizes_have_their_own_places() -> None:
    chunk = SequenceChunk([1, 2, 3], 3, ([5, 6], [7, 8, 9]), ())
    batch = ForwardBatch.build([chunk], page_items=(4, 2), device="cpu")
    assert batch.token_pages[0].tolist() == [5, 6, 6]
    assert batch.token_pages[1].tolist() == [8, 9, 9]
    assert batch.token_rows[1].tolist() == [1, 0, 1]
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
        page_items=(4,),
        logits_rows=expected.logits_rows,
    )
    assert torch.equal(actual.query_starts, expected.query_starts)
    assert torch.equal(actual.kv_lengths, expected.kv_lengths)
    assert actual.kv_length_list == expected.kv_length_list
    assert torch.equal(actual.token_pages[0], expected.token_pages[0])
    assert torch.equal(actual.token_rows[0], expected.token_rows[0])


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

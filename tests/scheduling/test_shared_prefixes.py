"""Blocks of a prompt that others begin with: found as soon as they are computed, and not before."""

from __future__ import annotations

from common.protocol.worker import StepDone
from common.request import SamplingParams
from common.scheduling.sequence import Sequence
from tests.scheduling.test_steps_ahead import CHUNK_MAX, PAGE_SIZE, Rig, digests_of

GREEDY = SamplingParams(max_new_tokens=9, seed=0)


def rig_of() -> Rig:
    return Rig(has_prefix_cache=True, is_prompt_only=True)


def found_count(rig: Rig, token_count: int) -> int:
    """Tokens of a prompt like the others' that are cached."""
    tokens = [1] * token_count
    return rig.account.match(digests_of(tokens), tokens, token_count - 1).token_count


def fail(rig: Rig, sequence: Sequence) -> None:
    """The oldest step draws from logits of one sequence that are not finite."""
    step = rig.sent.pop(0)
    ids = [chunk.request_id for chunk in step.chunks if chunk.is_last] + step.decode
    done = StepDone(step.step_id, ids, [1] * len(ids), failed={sequence.request_id: "nan"})
    (undrawn,) = rig.batcher.apply_done(done).failed
    assert undrawn.sequence is sequence
    rig.batcher.remove(sequence)


def finish_step(rig: Rig) -> None:
    """Plan a step and end it; who has its token leaves the batch, as on a prefill server."""
    assert rig.plan() is not None
    for token in rig.end().tokens:
        rig.batcher.stop(token.sequence)


def test_blocks_are_found_once_their_chunk_has_returned() -> None:
    rig = rig_of()
    rig.add(1, 3 * CHUNK_MAX)
    for computed_count in (0, CHUNK_MAX, 2 * CHUNK_MAX):
        assert found_count(rig, 3 * CHUNK_MAX) == computed_count
        rig.plan()
        assert found_count(rig, 3 * CHUNK_MAX) == computed_count, "it is only on its way"
        rig.end()
        while rig.sent:
            rig.end()


def test_blocks_of_a_prompt_that_is_given_up_stay() -> None:
    rig = rig_of()
    sequence = rig.add(1, 3 * CHUNK_MAX)
    rig.plan()
    rig.end()
    rig.batcher.remove(sequence)
    assert found_count(rig, 3 * CHUNK_MAX) == CHUNK_MAX
    assert rig.account.available_count(0) == 100, "all of them can be had again"


def test_blocks_of_a_prompt_that_fails_are_not_found_by_anybody() -> None:
    """What made its logits bad may lie in any of them."""
    rig = rig_of()
    sequence = rig.add(1, 2 * CHUNK_MAX)
    rig.plan()
    rig.end()
    assert found_count(rig, 2 * CHUNK_MAX) == CHUNK_MAX
    rig.plan()
    fail(rig, sequence)
    assert found_count(rig, 2 * CHUNK_MAX) == 0
    assert rig.account.available_count(0) == 100


def test_blocks_that_were_there_before_a_prompt_failed_stay() -> None:
    rig = rig_of()
    first = rig.add(1, CHUNK_MAX)
    rig.plan()
    rig.end()
    rig.batcher.remove(first)
    second = rig.add(2, 2 * CHUNK_MAX)
    assert second.cached_count == CHUNK_MAX
    rig.plan()
    fail(rig, second)
    assert found_count(rig, 2 * CHUNK_MAX) == CHUNK_MAX


def test_blocks_that_nobody_finds_any_more_give_way_to_new_ones() -> None:
    """Others may still read what a failed prompt has left, and the same tokens are cached anew."""
    rig = rig_of()
    failing = rig.add(1, 2 * CHUNK_MAX)
    rig.plan()
    rig.end()
    rig.plan()
    reader = rig.add(2, CHUNK_MAX + 1)
    assert reader.cached_count == CHUNK_MAX
    fail(rig, failing)
    again = rig.add(3, CHUNK_MAX)
    assert again.cached_count == 0
    rig.batcher.stop(reader)
    rig.plan()
    rig.end()
    assert found_count(rig, CHUNK_MAX + 1) == CHUNK_MAX
    for sequence in (reader, again):
        rig.batcher.remove(sequence)
    assert rig.account.flush_cache()
    rig.account.pool.check()
    assert rig.account.pool.free_count(0) == 100


def test_two_that_computed_the_same_blocks_both_offer_what_they_have_beyond() -> None:
    """The second one keeps its own copies as long as it lives."""
    rig = rig_of()
    shared, ends = [1] * PAGE_SIZE, ([2] * PAGE_SIZE, [3] * PAGE_SIZE)
    sequences = [rig.open(index, shared + end) for index, end in enumerate(ends, 1)]
    while rig.batcher.prompt_count:
        finish_step(rig)
    for end in ends:
        tokens = [*shared, *end, 9]
        match = rig.account.match(digests_of(tokens), tokens, len(tokens) - 1)
        assert match.block_count == 2
    assert rig.account.pool.used_count(0) == 4
    for sequence in sequences:
        rig.batcher.remove(sequence)
    assert rig.account.pool.used_count(0) == 3, "the copy is gone"
    assert rig.account.flush_cache() and rig.account.pool.free_count(0) == 100


def test_a_failed_prompt_does_not_take_the_blocks_of_others_with_it() -> None:
    rig = rig_of()
    first, second = (rig.open(index, [1] * CHUNK_MAX) for index in (1, 2))
    finish_step(rig)
    rig.plan()
    fail(rig, second)
    assert found_count(rig, CHUNK_MAX + 1) == CHUNK_MAX
    rig.batcher.remove(first)
    assert rig.account.available_count(0) == 100

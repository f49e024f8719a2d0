"""Steps that verify proposals: how many there may be, and what is made of the tokens they bring."""

from __future__ import annotations

import dataclasses

import pytest

from common.layout.component import FULL, SLOT, Live, LiveKind
from common.protocol.worker import Accepted, Step, StepDone
from common.request import FinishKind, SamplingParams, Speculated, TokenLogprobs
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.sequence import Sequence
from common.scheduling.step_outcome import TokensDone
from tests.scheduling.test_checkpoints import PAGE_SIZE, Rig

PROMPT = [1, 2, 3, 4, 5, 6]
WINDOW = Live(LiveKind.WINDOW, 6)


class Speculating(Rig):
    """A rig whose steps verify up to four proposals of each sequence."""

    def __init__(self, *lives: Live, counts: tuple[int, ...], token_max: int = 200) -> None:
        super().__init__(*lives, counts=counts)
        limits = self.batcher.limits
        self.batcher.limits = dataclasses.replace(
            limits, proposal_max=4, sequence_token_max=token_max
        )

    def begin(self, request_id: int = 1, **sampling: object) -> Sequence:
        """A sequence of PROMPT whose first token is drawn."""
        values: dict[str, object] = {"max_new_tokens": 40, "seed": 0, **sampling}
        sequence = self.account.open(
            request_id,
            list(PROMPT),
            len(PROMPT),
            SamplingParams(**values),  # type: ignore[arg-type]
        )
        assert sequence is not None
        self.batcher.add(sequence)
        self.plan()
        self.end()
        return sequence

    def verify(self, accepted: list[int], token: int = 9, **fields: object) -> TokensDone:
        """A step of one sequence, which accepts some of what is proposed."""
        self.plan()
        step = self.sent.pop(0)
        (request_id,), (count,) = step.decode, step.draft_counts
        assert len(accepted) <= count
        entry = Accepted(count, accepted, **fields)  # type: ignore[arg-type]
        done = StepDone(step.step_id, [request_id], [token], accepted={request_id: entry})
        (drawn,) = self.batcher.apply_done(done).tokens
        return drawn

    def next_step(self) -> Step:
        step = self.batcher.plan_step().step
        assert step is not None
        return step


def test_all_tokens_of_a_run_are_a_sequence_s_and_their_cache_is_computed() -> None:
    rig = Speculating(FULL, counts=(20,))
    sequence = rig.begin()
    drawn = rig.verify([10, 11])
    assert drawn.token_ids == [9, 10, 11] and drawn.finish is None
    assert sequence.token_ids == [*PROMPT, 1, 9, 10, 11]
    assert sequence.computed_count == len(sequence.token_ids) - 1
    assert drawn.speculated == Speculated(1, 4, 2)
    assert rig.next_step().decode_tokens == [11]


@pytest.mark.parametrize("left", range(1, 7))
def test_no_more_is_proposed_than_an_output_may_have(left: int) -> None:
    for limit in ({"max_new_tokens": 1 + left}, {}):
        token_max = 200 if limit else len(PROMPT) + 1 + left
        rig = Speculating(FULL, counts=(20,), token_max=token_max)
        rig.begin(**limit)
        assert (rig.next_step().draft_counts or [0]) == [min(4, left - 1)]


def test_a_run_that_reaches_the_length_ends_the_output() -> None:
    rig = Speculating(FULL, counts=(20,))
    rig.begin(max_new_tokens=4)
    drawn = rig.verify([10, 11])
    assert drawn.token_ids == [9, 10, 11]
    assert drawn.finish is not None and drawn.finish.kind is FinishKind.LENGTH


def test_a_run_is_cut_behind_a_token_that_ends_the_output() -> None:
    rig = Speculating(FULL, counts=(20,))
    sequence = rig.begin(stop_token_ids=(10,), return_logprob=True)
    step = rig.next_step()
    told = [TokenLogprobs(token, -1.0) for token in (9, 10, 11)]
    done = StepDone(
        step.step_id, [1], [9], {1: told[0]}, accepted={1: Accepted(4, [10, 11], told[1:])}
    )
    (drawn,) = rig.batcher.apply_done(done).tokens
    assert drawn.token_ids == [9, 10] and drawn.logprobs == told[:2]
    assert drawn.finish is not None and drawn.finish.matched == 10
    assert sequence.token_ids == [*PROMPT, 1, 9, 10]


def test_a_run_that_was_cut_leaves_no_state_to_go_on_from() -> None:
    """Its slot has the tokens behind the end as well."""
    for accepted, is_left in (([10, 11], True), ([10, 11, 12], False)):
        rig = Speculating(FULL, SLOT, counts=(20, 9))
        sequence = rig.open(1, PROMPT)
        sequence.sampling = SamplingParams(max_new_tokens=40, seed=0, stop_token_ids=(11,))
        rig.plan()
        rig.end()
        assert rig.verify(accepted).token_ids == [9, 10, 11]
        rig.batcher.remove(sequence)
        found = rig.match([*PROMPT, 1, 9, 10, 11, 50])
        assert (found.token_count == len(PROMPT) + 3) == is_left


def test_pages_are_taken_for_proposals_if_they_are_free_and_from_nobody() -> None:
    """Three pages: two of the prompt and its first token, and one more."""
    rig = Speculating(FULL, counts=(3,))
    first = rig.begin()
    assert len(PROMPT) + 1 + 4 <= 3 * PAGE_SIZE
    assert rig.next_step().draft_counts == [4]
    assert len(first.spans[0].page_ids) == 3
    crowded = Speculating(FULL, counts=(4,))
    crowded.begin(1)
    second = crowded.begin(2)
    planned = crowded.batcher.plan_step()
    assert not planned.retracted and planned.step is not None
    # Two pages each: the first one has 8 tokens by now, the second one 7.
    assert planned.step.draft_counts == [0, 1] and len(second.spans[0].page_ids) == 2


def test_windows_move_on_by_what_was_accepted() -> None:
    rig = Speculating(FULL, WINDOW, counts=(40, 6))
    sequence = rig.begin()
    for accepted in ([10, 11, 12, 13], [], [14], [15, 16, 17, 18], []):
        rig.verify(accepted)
        first = len(sequence.token_ids) - WINDOW.size  # the next token sees these
        span = sequence.spans[1]
        assert span.first_index * PAGE_SIZE <= max(0, first)
    rig.batcher.remove(sequence)
    rig.account.flush_cache()
    assert [rig.account.pool.used_count(group) for group in (0, 1)] == [0, 0]


def test_what_a_step_accepted_for_who_has_left_is_computed_and_not_known() -> None:
    rig = Speculating(FULL, SLOT, counts=(20, 9))
    sequence = rig.open(1, PROMPT)
    rig.plan()
    rig.end()
    step = rig.next_step()
    rig.batcher.remove(sequence)
    done = StepDone(step.step_id, [1], [9], accepted={1: Accepted(4, [10, 11])})
    assert rig.batcher.apply_done(done).tokens == []
    assert rig.match([*PROMPT, 1, 9]).token_count <= len(PROMPT)
    rig.account.flush_cache()
    assert rig.account.pool.used_count(0) == 0


def test_one_step_is_in_flight_where_proposals_are_verified() -> None:
    with pytest.raises(AssertionError):
        BatchLimits(8, 8, 200, frozenset(), in_flight_max=2, proposal_max=1)

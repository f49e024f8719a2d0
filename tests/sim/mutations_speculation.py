"""Bugs of steps that bring several tokens of a sequence, planted into the real cores.

Knows nothing of stories.
"""

from __future__ import annotations

import pytest

from common.protocol.worker import Accepted, StepDone
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.in_flight import Flight, InFlight
from common.scheduling.proposals import Proposals
from common.scheduling.sequence import Sequence
from common.scheduling.step_outcome import StepOutcome, TokensDone
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def the_page_of_a_token_taken_back_is_given_away(patch: Patch) -> None:
    """Pages behind what was accepted go back to the pool, while workers count on them."""
    apply_done = Batcher.apply_done

    def give_away(self: Batcher, done: StepDone) -> StepOutcome:
        outcome = apply_done(self, done)
        groups = self._account.groups
        for token in outcome.tokens:
            sequence = token.sequence
            if token.speculated.proposed_count and token.finish is None:
                for index, (group, span) in enumerate(zip(groups, sequence.spans, strict=True)):
                    end = group.page_end(len(sequence.token_ids)) - span.first_index
                    self._account.pool.release(index, span.page_ids[end:])
                    del span.page_ids[end:]
        return outcome

    patch.setattr(Batcher, "apply_done", give_away)


def a_run_is_not_cut_where_the_output_ends(patch: Patch) -> None:
    """All that was drawn belongs to the output."""

    def append(
        self: Proposals, sequence: Sequence, token_id: int, done: StepDone, limits: BatchLimits
    ) -> TokensDone:
        accepted = done.accepted.get(sequence.request_id, Accepted(0))
        tokens = [token_id, *accepted.token_ids]
        sequence.token_ids += tokens
        return TokensDone(sequence, tokens, [], limits.finish_of(sequence))

    patch.setattr(Proposals, "append", append)


def only_the_last_token_of_a_run_is_asked_for_the_end(patch: Patch) -> None:
    """One that ends the output inside the run is passed over, and the run goes on to its length."""
    proposals_for = BatchLimits.proposals_for

    def one_too_many(self: BatchLimits, sequence: Sequence) -> int:
        return min(self.proposal_max, proposals_for(self, sequence) + 1)

    a_run_is_not_cut_where_the_output_ends(patch)
    patch.setattr(BatchLimits, "proposals_for", one_too_many)


def acceptance_is_counted_before_verification(patch: Patch) -> None:
    """All proposals count as computed once they were sent."""
    end = InFlight.end

    def count_all(self: InFlight, done: StepDone) -> Flight:
        flight = end(self, done)
        for request_id, accepted in done.accepted.items():
            missing = accepted.proposed_count - len(accepted.token_ids)
            flight.sequences[request_id].computed_count += missing
        return flight

    patch.setattr(InFlight, "end", count_all)


def accepted_tokens_count_as_not_computed(patch: Patch) -> None:
    """A step leaves the cache of one token, as it did without proposals."""
    end = InFlight.end

    def count_one(self: InFlight, done: StepDone) -> Flight:
        flight = end(self, done)
        for request_id, accepted in done.accepted.items():
            flight.sequences[request_id].computed_count -= len(accepted.token_ids)
        return flight

    patch.setattr(InFlight, "end", count_one)


MUTATIONS = tuple(
    Mutation(name, plant, found_by, has_proposals=True)
    for name, plant, found_by in (
        ("page-of-a-token-taken-back", the_page_of_a_token_taken_back_is_given_away, 0),
        ("a-run-is-not-cut", a_run_is_not_cut_where_the_output_ends, 1),
        ("a-run-ends-too-late", only_the_last_token_of_a_run_is_asked_for_the_end, 0),
        ("accepted-before-verification", acceptance_is_counted_before_verification, 1),
        ("accepted-and-not-computed", accepted_tokens_count_as_not_computed, 0),
    )
)

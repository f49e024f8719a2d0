"""Tokens that are proposed ahead of sequences: how many a step may verify, and what came of them.

Workers propose and verify; here is known for how many there are pages. Knows nothing of steps.
"""

from __future__ import annotations

from common.protocol.worker import Accepted, StepDone
from common.request import FinishReason, Speculated
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import Sequence
from common.scheduling.step_outcome import TokensDone
from common.speculative import ACCEPTED_AT

NOTHING_PROPOSED = Accepted(0)
NOT_SPECULATED = Speculated()


class Proposals:
    """total: of all sequences since the start. accepted_counts: tokens that were accepted, by their
    place behind the latest one."""

    def __init__(self, account: PageAccount) -> None:
        self._account = account
        self.total = Speculated()
        self.accepted_counts: list[int] = []

    def count(self, decoding: list[Sequence], limits: BatchLimits) -> list[int]:
        """How many there may be for each of these, as `Step` has it: as many as there are pages
        for. No request is retracted for them, and nothing waited for; a cached prefix may go for
        what will be needed soon."""
        if not limits.proposal_max:
            return []
        counts: list[int] = []
        for sequence in decoding:
            count = limits.proposals_for(sequence)
            while count and not self._grow(sequence, len(sequence.token_ids) + count):
                count -= 1
            counts.append(count)
        return counts if any(counts) else []

    def _grow(self, sequence: Sequence, token_count: int) -> bool:
        """Add the pages that so many tokens need, if they are free now."""
        needs = self._account.needs(sequence.spans, token_count)
        return not self._account.saves_for(needs) and self._account.grow(sequence, token_count)

    def append(
        self, sequence: Sequence, token_id: int, done: StepDone, limits: BatchLimits
    ) -> TokensDone:
        """Take what was drawn for a sequence, up to a token that ends it, and what was guessed
        behind the first one for whoever decodes it elsewhere."""
        sequence.first_proposals = done.guesses.get(sequence.request_id, [])
        accepted = done.accepted.get(sequence.request_id, NOTHING_PROPOSED)
        speculated = self._note(accepted)
        taken: list[int] = []
        finish: FinishReason | None = None
        for one in (token_id, *accepted.token_ids):
            sequence.token_ids.append(one)
            taken.append(one)
            finish = limits.finish_of(sequence)
            if finish is not None:
                break
        first = done.logprobs.get(sequence.request_id)
        logprobs = [] if first is None else [first, *accepted.logprobs][: len(taken)]
        return TokensDone(sequence, taken, logprobs, finish, speculated)

    def _note(self, accepted: Accepted) -> Speculated:
        if not accepted.proposed_count:
            return NOT_SPECULATED
        counts = self.accepted_counts
        counts += [0] * (accepted.proposed_count - len(counts))
        for place in range(len(accepted.token_ids)):
            counts[place] += 1
        noted = Speculated(1, accepted.proposed_count, len(accepted.token_ids))
        self.total += noted
        return noted

    @property
    def counters(self) -> dict[str, float]:
        """By the names of the scheduler's counters; none of a server that verifies nothing."""
        if not self.total.step_count:
            return {}
        return {
            "spec_steps": float(self.total.step_count),
            "spec_proposed_tokens": float(self.total.proposed_count),
            "spec_accepted_tokens": float(self.total.accepted_count),
            **{
                f"{ACCEPTED_AT}{place}": float(count)
                for place, count in enumerate(self.accepted_counts)
            },
        }

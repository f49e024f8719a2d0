"""What steps may hold, and when a sequence has ended.

Knows nothing of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.request import FinishKind, FinishReason, SamplingParams
from common.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """chunk_token_max: prompt tokens per step. running_max: sequences that a step computes at most.
    sequence_token_max: tokens a sequence may reach (context length or pool, whichever is less).
    in_flight_max: steps that may be with the workers. is_prompt_only: sequences leave with the
    token after their prompt. proposal_max: tokens that are proposed ahead of a decoding sequence in
    a step; how many are accepted decides where the next step begins, so then one is in flight.
    guess_count: tokens that are guessed behind the first one of a prompt, for another server."""

    chunk_token_max: int
    running_max: int
    sequence_token_max: int
    eos_token_ids: frozenset[int]
    in_flight_max: int = 1
    is_prompt_only: bool = False
    proposal_max: int = 0
    guess_count: int = 0

    def __post_init__(self) -> None:
        assert not self.proposal_max or self.in_flight_max == 1, self

    def proposals_for(self, sequence: Sequence) -> int:
        """How many may be verified for one that decodes: with all accepted, it ends at the last."""
        lengths = self.sequence_token_max - len(sequence.token_ids)
        outputs = sequence.sampling.max_new_tokens - sequence.output_count
        return max(0, min(self.proposal_max, min(lengths, outputs) - 1))

    def finish_of(self, sequence: Sequence) -> FinishReason | None:
        """Whether the last token of a sequence ends it."""
        sampling = sequence.sampling
        token_id = sequence.token_ids[-1]
        is_long = sequence.output_count > sampling.min_new_tokens or sampling.min_new_tokens == 0
        if is_long and self._is_stop(sampling, token_id):
            return FinishReason(FinishKind.STOP, matched=token_id)
        if self.is_at_end(sequence, len(sequence.token_ids)):
            return FinishReason(FinishKind.LENGTH)
        return None

    def is_at_end(self, sequence: Sequence, token_count: int) -> bool:
        """Whether a sequence ends with so many tokens, whatever they are."""
        output_count = token_count - sequence.prompt_count
        is_long = token_count >= self.sequence_token_max
        return is_long or output_count >= sequence.sampling.max_new_tokens

    def ends_too_early(self, sampling: SamplingParams, first_token: int) -> bool:
        """Whether a first token, drawn elsewhere, would have been held back here."""
        return sampling.min_new_tokens > 0 and self._is_stop(sampling, first_token)

    def _is_stop(self, sampling: SamplingParams, token_id: int) -> bool:
        is_eos = token_id in self.eos_token_ids and not sampling.ignore_eos
        return is_eos or token_id in sampling.stop_token_ids

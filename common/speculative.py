"""Settings of speculation: who proposes tokens ahead of a sequence, and how many.

Knows nothing of how they are proposed or verified.
"""

from __future__ import annotations

from enum import StrEnum

DEFAULT_PROPOSAL_MAX = 4
DEFAULT_DRAFT_P_MIN = 0.3
"""A guess costs a pass of the draft and a row of the model's next pass, a third of what a token is
worth where that was measured (`python -m bench speculation`)."""
ACCEPTED_AT = "spec_accepted_at_"
"""Counters of tokens that were accepted, with their place among the proposals behind it."""


class SpeculativeAlgorithm(StrEnum):
    """Who proposes tokens ahead of a sequence, to be verified several in a step.

    NGRAM: the sequence's own tokens, where the latest ones stood before (prompt lookup).
    NEXTN: a layer of the checkpoint that predicts more tokens at a time (multi-token prediction).
    EAGLE3: a layer of another checkpoint, trained to guess what the model draws.
    """

    OFF = ""
    NGRAM = "NGRAM"
    NEXTN = "NEXTN"
    EAGLE3 = "EAGLE3"

    @property
    def has_draft(self) -> bool:
        """Whether layers propose, whose cache lies behind the model's own."""
        return self in (SpeculativeAlgorithm.NEXTN, SpeculativeAlgorithm.EAGLE3)


def proposal_max(algorithm: SpeculativeAlgorithm, steps: int | None, tokens: int | None) -> int:
    """Tokens that are proposed in a step. steps: so many; tokens: that a step verifies, the latest
    one included; None where the settings don't say."""
    if algorithm is SpeculativeAlgorithm.OFF:
        return 0
    if steps is not None:
        return steps
    return tokens - 1 if tokens is not None else DEFAULT_PROPOSAL_MAX

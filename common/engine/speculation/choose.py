"""The proposer that the settings name."""

from __future__ import annotations

from common.engine.speculation.ngram import NgramProposer
from common.engine.speculation.proposer import Proposer
from common.speculative import SpeculativeAlgorithm


def choose_proposer(algorithm: SpeculativeAlgorithm) -> Proposer | None:
    """None if nothing proposes, or a draft does, which is a part of its model."""
    return NgramProposer() if algorithm is SpeculativeAlgorithm.NGRAM else None

"""The proposer that the settings name."""

from __future__ import annotations

from common.engine.speculation.ngram import NgramProposer
from common.engine.speculation.proposer import Proposer
from common.speculative import SpeculativeAlgorithm


def choose_proposer(algorithm: SpeculativeAlgorithm) -> Proposer:
    """algorithm: any but none."""
    assert algorithm is SpeculativeAlgorithm.NGRAM, algorithm
    return NgramProposer()

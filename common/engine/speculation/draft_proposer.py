"""Proposals of a draft's layers, which follow every pass of the model (`Proposer`).

A sequence whose cache came from elsewhere has no state to guess from before its first pass here.
Nor have the samples of a prompt, which have no pages yet when their first tokens are drawn; the
draft's row of the prompt's last token is for all of them that of the first one's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.cache.kv_pool import KvPool
from common.engine.models.causal_lm import CausalLm
from common.engine.sequence_table import SequenceTable
from common.engine.speculation.draft_passes import DraftPasses
from common.engine.speculation.proposer import Drawn, FollowedRows


class DraftProposer:
    """See `Proposer`. model: with a draft, whose layers lie in the pool behind its own. chance_min:
    guesses that are less likely than that to be right are not made."""

    def __init__(
        self, model: CausalLm, pool: KvPool, table: SequenceTable, chance_min: float = 0.0
    ) -> None:
        assert model.draft is not None
        config = model.draft.config
        self.name = str(config.algorithm)
        self.tapped = config.tapped
        self.layer_ids = config.layer_ids
        self._table = table
        self._chance_min = chance_min
        self._passes = DraftPasses(model, model.draft, pool, table)
        # By slot: what is guessed from, behind the last row that is there.
        self._states: dict[int, Tensor] = {}

    def add(self, slot: int, token_ids: NDArray[np.int64]) -> None:
        pass

    def remove(self, slot: int) -> None:
        self._states.pop(slot, None)

    def note(self, drawn: Drawn) -> None:
        spans = self._spans(drawn)
        if not spans:
            return
        assert drawn.tapped is not None
        states = self._passes.follow(drawn.tapped, spans)
        for span, state in zip(spans, states.unbind(), strict=True):
            self._states[span.slot] = state

    def propose(self, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        wanted = [
            count if slot in self._states else 0 for slot, count in zip(slots, counts, strict=True)
        ]
        chosen = [place for place, count in enumerate(wanted) if count]
        proposals: list[list[int]] = [[] for _ in slots]
        if not chosen:
            return proposals
        states = torch.stack([self._states[slots[place]] for place in chosen])
        guesses = self._passes.guess(
            np.array([slots[place] for place in chosen], dtype=np.int64),
            [wanted[place] for place in chosen],
            states,
            self._chance_min,
        )
        for place, tokens in zip(chosen, guesses, strict=True):
            proposals[place] = tokens
        return proposals

    def _spans(self, drawn: Drawn) -> list[FollowedRows]:
        """Rows whose next token is known by now."""
        spans = [rows for rows in drawn.prompts if rows.next_tokens]
        decoded = zip(drawn.slots, drawn.tokens, drawn.first_rows, strict=True)
        for slot, tokens, row in list(decoded)[drawn.decode_start :]:
            if tokens:
                start = int(self._table.lengths[slot]) - len(tokens) - 1
                spans.append(FollowedRows(slot, row, start, tokens))
        return spans

"""Passes of a draft over the pool of its model: rows that follow the model's, and rows of guesses.

    tokens     t0 .. t5 known, t6 drawn by a pass           rows of that pass: 3 4 5
    follow     row 3 of h3, t4    row 4 of h4, t5    row 5 of h5, t6 → state s5
    guess      s5 → g7    row 6 of s5, g7 → s6 → g8    row 7 of s6, g8 → s7 → g9

Rows of guesses are scratch: they lie behind the last row of a known token, and what follows there
writes them again before anything reads them. Knows nothing of requests, nor of what becomes of
guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch
from common.engine.host_copy import upload
from common.engine.models.causal_lm import CausalLm
from common.engine.models.draft import Draft
from common.engine.sequence_table import SequenceTable, Slots
from common.engine.speculation.proposer import FollowedRows


class DraftPasses:
    """One writer: the thread that runs the model."""

    def __init__(self, model: CausalLm, draft: Draft, pool: KvPool, table: SequenceTable) -> None:
        self._model = model
        self._draft = draft
        self._pool = pool
        self._table = table
        self._device = model.context.device

    def follow(self, tapped: Tensor, spans: Sequence[FollowedRows]) -> Tensor:
        """Fill the draft's rows behind a pass of the model.

        tapped: of all rows of that pass, as `HiddenTap.states` has it.
        Returns: the state behind the last row of each span, [spans, hidden size].
        """
        counts = np.array([len(span.next_tokens) for span in spans], dtype=np.int64)
        starts = np.array([span.start for span in spans], dtype=np.int64)
        slots = np.array([span.slot for span in spans], dtype=np.int64)
        tokens = np.concatenate([np.asarray(s.next_tokens, dtype=np.int64) for s in spans])
        rows = _ranges(np.array([span.first_row for span in spans], dtype=np.int64), counts)
        index, last_rows, token_ids = upload(self._device, rows, np.cumsum(counts) - 1, tokens)
        states = self._draft.read(tapped.index_select(0, index))
        return self._run(slots, starts, counts, token_ids, states).index_select(0, last_rows)

    def guess(self, slots: Slots, counts: Sequence[int], states: Tensor) -> list[list[int]]:
        """Tokens that may follow the latest one of each sequence, `counts` of them.

        The sequences have pages for so many tokens. states: [B, hidden size], behind the last row
        of each, as `follow` returned them.
        """
        guesses: list[list[int]] = [[] for _ in counts]
        alive, wanted = np.arange(len(counts)), np.array(counts, dtype=np.int64)
        for number in range(max(counts, default=0)):
            going = np.flatnonzero(wanted[alive] > number)
            if len(going) < len(alive):
                (index,) = upload(self._device, going)
                states, alive = states.index_select(0, index), alive[going]
            if number:
                tokens = np.array([guesses[b][-1] for b in alive], dtype=np.int64)
                (token_ids,) = upload(self._device, tokens)
                starts = self._table.lengths[slots[alive]] - 2 + number
                ones = np.ones(len(alive), dtype=np.int64)
                states = self._run(slots[alive], starts, ones, token_ids, states)
            for b, token in zip(alive, self._draft.guess(states).tolist(), strict=True):
                guesses[b].append(token)
        return guesses

    def _run(
        self,
        slots: Slots,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        token_ids: Tensor,
        states: Tensor,
    ) -> Tensor:
        """One pass: `counts` rows of each slot from a position on, of states and tokens."""
        lengths = starts + counts
        groups = self._pool.groups
        tables = [self._table.page_table(g, slots, lengths) for g in range(len(groups))]
        positions, *page_tables = upload(self._device, _ranges(starts, counts), *tables)
        batch = ForwardBatch.from_tensors(
            token_ids=token_ids,
            positions=positions,
            query_lengths=counts.tolist(),
            kv_lengths=lengths.tolist(),
            page_tables=page_tables,
            groups=groups,
            logits_rows=None,
        )
        attention = self._model.attention.start(batch, self._pool)
        rotations = self._draft.rotate(batch)
        return self._draft(states, self._model.layer_pass(batch, self._pool, attention, rotations))


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, .. of each, one after the other."""
    shifts: NDArray[np.int64] = np.repeat(starts - np.cumsum(counts) + counts, counts)
    return shifts + np.arange(len(shifts))

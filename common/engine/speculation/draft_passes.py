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
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch
from common.engine.host_copy import HostCopy, upload
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
        batch = self._batch(slots, starts, counts, token_ids)
        return self._pass(batch, states).index_select(0, last_rows)

    def guess(
        self, slots: Slots, counts: Sequence[int], states: Tensor, chance_min: float = 0.0
    ) -> list[list[int]]:
        """Tokens that may follow the latest one of each sequence, at most `counts` of them: as long
        as all of them are as likely as `chance_min` to be right, as the draft has it.

        The sequences have pages for so many tokens. states: [B, hidden size], behind the last row
        of each, as `follow` returned them.
        """
        # Those that guess longest come first, so that every pass has the first ones of them.
        wanted = np.array(counts, dtype=np.int64)
        order = np.argsort(-wanted, kind="stable")
        going = [int((wanted > number).sum()) for number in range(int(wanted.max(initial=0)))]
        guesses: list[list[int]] = [[] for _ in counts]
        if not going:
            return guesses
        (index,) = upload(self._device, order)
        states = states.index_select(0, index)
        chances = np.ones(len(order))
        tokens: Tensor | None = None
        rows: ForwardBatch | None = None
        first = 0
        for count in going:
            if tokens is not None:
                if rows is None:
                    rows = self._guess_rows(slots[order], going[1:])
                batch = rows.decodes(first, first + count, tokens[:count])
                states = self._pass(batch, states[:count])
                first += count
            guess = self._draft.guess(states[:count])
            tokens = guess.tokens
            found, likely = HostCopy([tokens, guess.chances]).wait()
            chances = chances[:count] * likely.numpy()
            for row in np.flatnonzero(chances >= chance_min).tolist():
                guesses[order[row]].append(int(found[row]))
            if not (chances >= chance_min).any():
                break
        return guesses

    def _guess_rows(self, slots: Slots, going: Sequence[int]) -> ForwardBatch:
        """The rows of all passes that guess, one pass after the other, of the first `going` slots
        each. Their tokens are not known yet."""
        row_slots = np.concatenate([slots[:count] for count in going])
        starts = np.concatenate(
            [self._table.lengths[slots[:count]] - 1 + number for number, count in enumerate(going)]
        )
        return self._batch(row_slots, starts, np.ones_like(starts), None)

    def _batch(
        self,
        slots: Slots,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        token_ids: Tensor | None,
    ) -> ForwardBatch:
        """`counts` rows of each slot from a position on. token_ids: int64[rows]; None for zeros."""
        lengths = starts + counts
        groups = self._pool.groups
        tables = [self._table.page_table(g, slots, lengths) for g in range(len(groups))]
        positions, *page_tables = upload(self._device, _ranges(starts, counts), *tables)
        return ForwardBatch.from_tensors(
            token_ids=torch.zeros_like(positions) if token_ids is None else token_ids,
            positions=positions,
            query_lengths=counts.tolist(),
            kv_lengths=lengths.tolist(),
            page_tables=page_tables,
            groups=groups,
            logits_rows=None,
        )

    def _pass(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        attention = self._model.attention.start(batch, self._pool)
        rotations = self._draft.rotate(batch)
        return self._draft(states, self._model.layer_pass(batch, self._pool, attention, rotations))


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, .. of each, one after the other."""
    shifts: NDArray[np.int64] = np.repeat(starts - np.cumsum(counts) + counts, counts)
    return shifts + np.arange(len(shifts))

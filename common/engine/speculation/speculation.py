"""Proposals of the sequences that decode, and what becomes of them when their rows are computed.

Verification draws. Row 0 of a sequence, behind its latest token, is drawn as in any other step. As
long as what is drawn equals the next proposal, the row behind that proposal is what the next step
would have computed, and is drawn as well; the first difference ends it. Noise is a function of seed
and position, so the output is token for token the one without proposals, drawn or greedy, and
penalties, grammars and log-probabilities see each token once, in order. For one proposal that is
the acceptance of rejection sampling, whose proposals have probability 1 here.

What a row of a proposal that was not accepted has left in the cache is written over by the next
step, which begins there. Knows nothing of steps or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.engine.cache.kv_pool import KvPool
from common.engine.host_copy import upload
from common.engine.models.draft import HiddenTap
from common.engine.sampling.draw import Draw, Sampled
from common.engine.sampling.sampler import Sampler
from common.engine.sequence_table import SequenceTable, Slots
from common.engine.speculation.decode_rows import DecodeRows
from common.engine.speculation.proposer import Drawn, FollowedRows, Proposer
from common.engine.speculation.spare_states import SpareStates
from common.engine.step_work import StepWork
from common.layout.component import LiveKind
from common.protocol.worker import Accepted
from common.request import SamplingParams, TokenLogprobs
from common.request_bounds import PROPOSAL_COUNT_MAX


@dataclass(slots=True)
class Run:
    """What was drawn for one sequence that decoded: nothing if it failed. logprobs: of the tokens
    behind the first one, where wanted."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


class Speculation:
    """One writer: the thread that runs the model.

    spare_count: spare slots of every slot group of the pool (`SpareStates`).
    """

    def __init__(
        self,
        proposer: Proposer,
        pool: KvPool,
        sequences: SequenceTable,
        sampler: Sampler,
        eos_token_ids: Sequence[int],
        spare_count: int,
    ) -> None:
        self.proposer = proposer
        self._sequences = sequences
        self._sampler = sampler
        self._eos_token_ids = frozenset(eos_token_ids)
        self._states = SpareStates(pool, spare_count)
        self._block_sizes = [
            group.live.size for group in pool.groups if group.live.kind is LiveKind.TAIL
        ]
        self._group_count = len(pool.groups)
        self._given: dict[int, list[int]] = {}
        self._endings: dict[int, frozenset[int]] = {}

    # ---- sequences come and go -------------------------------------------------------------------

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: Tensor,
        proposals: Sequence[int] = (),
    ) -> None:
        """A sequence begins, with int64[n] tokens on the host, prompt and output so far.

        proposals: first ones, of another server; what is no token ends them.
        """
        self.proposer.add(slot, token_ids.numpy())
        own = frozenset() if sampling.ignore_eos else self._eos_token_ids
        self._endings[slot] = own.union(sampling.stop_token_ids)
        is_token = [0 <= token < self._sampler.vocab_size for token in proposals]
        count = is_token.index(False) if False in is_token else len(is_token)
        if count:
            self._given[slot] = list(proposals[:count])

    def remove(self, slot: int) -> None:
        self.proposer.remove(slot)
        del self._endings[slot]
        self._given.pop(slot, None)

    # ---- before the pass -------------------------------------------------------------------------

    def propose(self, slots: Slots, counts: Sequence[int]) -> DecodeRows:
        """The rows of a step that decodes these sequences, with at most so many proposals each."""
        wanted = [
            min(count, self._taken_back_max(slot))
            for slot, count in zip(slots.tolist(), counts, strict=True)
        ]
        wanted = self._states.fit(wanted)
        proposals = self.proposer.propose(slots.tolist(), wanted)
        for place, slot in enumerate(slots.tolist()):
            given = self._given.pop(slot, None)
            if given is not None:
                proposals[place] = given[: wanted[place]]
        assert all(len(p) <= n for p, n in zip(proposals, wanted, strict=True)), (proposals, wanted)
        return DecodeRows(slots, proposals)

    def _taken_back_max(self, slot: int) -> int:
        """Proposals that a sequence's tails can take back, all of them. A row overwrites the one
        that is size + back tokens older. The next token, here or one token earlier, reads
        the open block and `back` rows before it.

            size 4, back 4, token 10 decodes    ring  8  9  2  3  4  5  6  7     reads 4 .. 9
            row 10 overwrites 2, a proposal behind it 3, and a second one would overwrite 4
        """
        first = int(self._sequences.lengths[slot]) - 1
        counts = [size - 1 - first % size for size in self._block_sizes]
        return min(counts, default=PROPOSAL_COUNT_MAX)

    def state_pages(self, rows: DecodeRows, first: int) -> dict[int, Sequence[int]]:
        """`ForwardBatch.state_pages` of rows that are sequences first, first + 1, ... of a pass."""
        if self._states.count is None and not self._block_sizes:
            return {}
        nothing = [0] * self._group_count
        is_kept = self._states.count is not None
        return {
            first + row: self._states.page_ids(number) if is_kept else nothing
            for number, row in enumerate(rows.continued)
        }

    # ---- behind the pass -------------------------------------------------------------------------

    def tap(self) -> HiddenTap | None:
        """Takes out of a pass what the proposer wants to see of it."""
        return HiddenTap(self.proposer.tapped) if self.proposer.tapped else None

    def finish(
        self, work: StepWork, logits: Tensor, draw: Draw, tap: HiddenTap | None = None
    ) -> list[Run]:
        """Draw behind proposals for as long as they turn out right, and tell the proposer.

        logits: float32[rows, vocabulary] of the whole step, overwritten. draw: of the sampled
        slots, to which it was appended. tap: of this pass.
        Returns: what was drawn of each sequence that decodes.
        """
        sampled, first = draw.finish(), work.prompt_draw_count
        drawn = [
            [] if row in sampled.failed else [token] for row, token in enumerate(sampled.token_ids)
        ]
        runs = [Run(tokens, []) for tokens in drawn[first:]]
        if work.decodes.has_proposals:
            self._verify(work.decodes, logits[work.decode_logits], runs)
        self.proposer.note(
            Drawn(
                slots=work.sampled_slots.tolist(),
                tokens=drawn,
                first_rows=work.drawn_rows(),
                decode_start=first,
                prompts=self._prompts(work, drawn) if tap is not None else (),
                tapped=None if tap is None else tap.states,
            )
        )
        return runs

    def _prompts(self, work: StepWork, drawn: Sequence[Sequence[int]]) -> list[FollowedRows]:
        """Chunks and the tokens behind their rows. drawn: for each of the sampled slots."""
        prompts: list[FollowedRows] = []
        first_row, place = 0, 0
        for chunk, slot in zip(work.chunks, work.chunk_slots.tolist(), strict=True):
            known = self._sequences.tokens(slot)[chunk.start + 1 : chunk.stop + 1].tolist()
            if chunk.is_last:
                known += drawn[place][:1]
                place += len(chunk.drawing)
            prompts.append(FollowedRows(slot, first_row, chunk.start, known))
            first_row += chunk.stop - chunk.start
        return prompts

    def guess(self, work: StepWork, count: int) -> dict[int, list[int]]:
        """At most `count` tokens behind the first one of each prompt that ended, by request id; as
        far as its pages have rows for them. None for samples, which are of no sequence yet."""
        ended = [
            (chunk.request_id, slot)
            for chunk, slot in zip(work.chunks, work.chunk_slots.tolist(), strict=True)
            if chunk.is_last and not chunk.samples
        ]
        if not ended:
            return {}
        slots = np.array([slot for _, slot in ended], dtype=np.int64)
        # The first guess needs no row; the row of each one but the last is a token's.
        room = self._sequences.covered(slots) - self._sequences.lengths[slots] + 2
        counts = np.clip(room, 0, count).tolist()
        guesses = self.proposer.propose(slots.tolist(), counts)
        return {request_id: found for (request_id, _), found in zip(ended, guesses, strict=True)}

    def _verify(self, rows: DecodeRows, logits: Tensor, runs: list[Run]) -> None:
        going = [i for i in range(len(runs)) if self._goes_on(rows, runs[i], i)]
        while going:
            going = self._draw(rows, logits, going, runs)
        self._keep_states(rows, runs)

    def _goes_on(self, rows: DecodeRows, run: Run, i: int) -> bool:
        """Whether the latest token that was drawn is what was proposed, and more may follow it."""
        depth, proposals = len(run.tokens) - 1, rows.proposals[i]
        if not 0 <= depth < len(proposals):
            return False
        token = run.tokens[depth]
        return token == proposals[depth] and token not in self._endings[int(rows.slots[i])]

    def _draw(
        self, rows: DecodeRows, logits: Tensor, going: list[int], runs: list[Run]
    ) -> list[int]:
        """Behind every right proposal of sequences whose draws do not see each other, behind the
        next one of the others. What is drawn behind a wrong one counts for nothing. A draw that
        fails is none: the next step draws it first, fails as well and reports it.

        Returns: those that go on.
        """
        slots = rows.slots[going]
        depths = np.array([len(runs[i].tokens) for i in going], dtype=np.int64)
        rests = rows.counts[going] + 1 - depths
        counts = np.where(self._sampler.draws_ahead(slots), rests, 1)
        firsts = np.cumsum(counts) - counts
        offsets = np.arange(counts.sum()) - np.repeat(firsts, counts)
        logits_rows = np.repeat(rows.first_rows[going] + depths, counts) + offsets
        row_slots = np.repeat(slots, counts)
        (index,) = upload(self._sequences.device, logits_rows)
        positions = self._sequences.lengths[row_slots] + offsets
        draw = self._sampler.draw(logits[index], row_slots, positions)
        sampled = draw.finish()
        taken = np.zeros(len(going), dtype=np.int64)
        still: list[int] = []
        for place, i in enumerate(going):
            first, count = int(firsts[place]), int(counts[place])
            taken[place] = self._take(rows, runs[i], i, sampled, range(first, first + count))
            if taken[place] == count and self._goes_on(rows, runs[i], i):
                still.append(i)
        kept = np.flatnonzero(taken)
        if len(kept):
            index, places = upload(self._sequences.device, slots[kept], (firsts + taken - 1)[kept])
            self._sequences.append(slots[kept], index, draw.tokens[places], taken[kept])
        return still

    def _take(
        self, rows: DecodeRows, run: Run, i: int, sampled: Sampled, drawn: Sequence[int]
    ) -> int:
        """How many of the rows that were drawn one behind the other are tokens of the run."""
        for number, row in enumerate(drawn):
            if row in sampled.failed or (number and not self._goes_on(rows, run, i)):
                return number
            run.tokens.append(sampled.token_ids[row])
            if row in sampled.logprobs:
                run.logprobs.append(sampled.logprobs[row])
        return len(drawn)

    def _keep_states(self, rows: DecodeRows, runs: Sequence[Run]) -> None:
        """Spare slots are numbered in the order of the rows that the next row goes on from."""
        if self._states.count is None:
            return
        spare = np.cumsum(rows.counts) - rows.counts
        kept = [
            (int(spare[i]) + len(run.tokens) - 1, self._sequences.first_pages(int(slot)))
            for i, (slot, run) in enumerate(zip(rows.slots, runs, strict=True))
            if 0 < len(run.tokens) <= rows.counts[i]
        ]
        self._states.take_over(kept)


def accepted_of(
    request_ids: Sequence[int], rows: DecodeRows, runs: Sequence[Run]
) -> dict[int, Accepted]:
    """As `StepDone` has it; request_ids: of the sequences of `rows`."""
    return {
        request_id: Accepted(len(proposals), run.tokens[1:], run.logprobs)
        for request_id, proposals, run in zip(request_ids, rows.proposals, runs, strict=True)
        if proposals
    }

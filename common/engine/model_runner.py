"""Runs one step of the scheduler on one rank: which tokens to compute, the forward pass, the draw.

A `Step` carries only changes; the state of running sequences lies here, as arrays. A step is
launched without waiting for the tokens of the step before it: they are on the device, where they
are needed, and every sequence's length is known. So on CUDA a step can be launched while another
one runs. Knows nothing of sockets, peers or the reasons for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.clock import Clock
from common.engine.cache.kv_pool import KvPool
from common.engine.cache.page_copies import copy_pages
from common.engine.forward_batch import ForwardBatch, HostRows
from common.engine.graphs.decode_graphs import DecodeGraphs
from common.engine.host_copy import upload
from common.engine.models.causal_lm import CausalLm
from common.engine.models.draft import HiddenTap
from common.engine.pending_step import PendingStep, ScoredPrompt
from common.engine.prompt_scores import PromptScores
from common.engine.sampling.draw import Draw
from common.engine.sampling.sampler import Sampler
from common.engine.sampling.sampling_table import why_refused
from common.engine.sequence_table import SequenceTable
from common.engine.speculation.decode_rows import DecodeRows
from common.engine.speculation.draft_proposer import DraftProposer
from common.engine.speculation.proposer import Proposer
from common.engine.speculation.speculation import Speculation, accepted_of
from common.engine.step_work import StepWork
from common.grammar import GrammarCompiler
from common.protocol.worker import (
    Accepted,
    NewSequence,
    PageGrant,
    PrefillChunk,
    Step,
    StepDone,
)
from common.request import SamplingParams

OnLayer = Callable[[int], None]

NO_TOKENS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of a forward pass on the device; `StepWork` has the order.

    token_ids, positions: int64, of the batch's tokens. sampled_slots: int64[R]. logits_rows: int64,
    of the tokens whose logits are wanted; None for all. page_tables: one int32[B, pages] per page
    group.
    """

    token_ids: Tensor
    positions: Tensor
    sampled_slots: Tensor
    logits_rows: Tensor | None
    page_tables: list[Tensor]


class ModelRunner:
    """Model, pool and sequences of one rank. One writer: the thread that calls `launch`.

    grammars: without it, where tokens are drawn, no output can be made to follow a grammar.
    graphs: recorded passes of this model over this pool, for steps that only decode.
    proposer: of tokens ahead of sequences, where any are verified; a model with a draft proposes by
    that, what is at least as likely as `draft_p_min`. spare_count: pages at the end of each slot
    group of the pool that are kept for that, and are no request's.
    """

    def __init__(
        self,
        model: CausalLm,
        pool: KvPool,
        clock: Clock,
        grammars: GrammarCompiler | None = None,
        graphs: DecodeGraphs | None = None,
        proposer: Proposer | None = None,
        spare_count: int = 0,
        draft_p_min: float = 0.0,
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._pool = pool
        self._clock = clock
        self._vocab_size = model.config.vocab_size
        self._device = model.context.device
        self._sequences = SequenceTable(pool.groups, self._device)
        self._draws_tokens = model.head is not None
        self._lacks_grammars = self._draws_tokens and grammars is None
        eos_token_ids = list(model.config.eos_token_ids)
        self._sampler = Sampler(
            self._vocab_size,
            eos_token_ids,
            self._device,
            grammars if self._draws_tokens else None,
        )
        self._prompt_scores = PromptScores(self._sequences, self._sampler)
        self._speculation: Speculation | None = None
        if model.draft is not None:
            proposer = DraftProposer(model, pool, self._sequences, draft_p_min)
        if proposer is not None:
            assert self._draws_tokens, "proposals are made where tokens are drawn"
            self._speculation = Speculation(
                proposer, pool, self._sequences, self._sampler, eos_token_ids, spare_count
            )
        self._sampling: dict[int, tuple[SamplingParams, int]] = {}  # by slot, with prompt_count
        self._refused: dict[int, str] = {}

    @property
    def sequence_count(self) -> int:
        return len(self._sequences)

    def use(self, model: CausalLm, graphs: DecodeGraphs | None) -> None:
        """Compute with another model of the same config from the next step on; no sequence is known
        now. graphs: its recorded passes."""
        assert not len(self._sequences)
        self._model, self._graphs = model, graphs

    @torch.inference_mode()
    def forget_all(self) -> None:
        """No sequence goes on: the scheduler that knew them is gone."""
        self._retire([*self._sequences.request_ids, *self._refused])

    def run(self, step: Step, on_layer: OnLayer | None = None) -> StepDone:
        """`launch`, and wait for it."""
        return self.launch(step, on_layer).finish()

    @torch.inference_mode()
    def launch(self, step: Step, on_layer: OnLayer | None = None) -> PendingStep:
        """Apply the step's changes, copy, compute, draw; on a CPU all is done when it returns.

        on_layer: called for each layer behind its last kernel, when its cache is complete.
        Every sequence that was due a token is in `request_ids`; those in `failed` have none, and
        the others are not affected. A sequence that can't be run (a token outside the vocabulary,
        sampling values out of range) fails when its first token is due. A sequence that fails in
        the draw may be in the next step already. The token that the next step draws for it is
        discarded. A pipeline stage without the head draws nothing: its answer names no request.
        """
        started_at = self._clock.now()
        self._retire(step.retired)
        for new in step.new:
            self._introduce(new)
        for chunk in step.chunks:
            self._introduce_samples(chunk)
        self._grant(step.grants)
        copy_pages(self._pool, step.copies)
        if not self._draws_tokens:
            self._hear_tokens(step)
        due = [drawing for chunk in step.chunks for drawing in chunk.drawing] + step.decode
        refused = {r: self._refused[r] for r in due if r in self._refused}
        work = self._plan(step)
        draw: Draw | None = None
        scored: list[ScoredPrompt] = []
        accepted: dict[int, Accepted] = {}
        guesses: dict[int, list[int]] = {}
        if not work.is_empty:
            tap = None if self._speculation is None else self._speculation.tap()
            sampled, logits = self._forward(work, on_layer, tap)
            if logits is None:
                return PendingStep(step.step_id, self._clock, started_at)
            scored = self._prompt_scores.score(work, logits[work.decode_logits.stop :])
            draw = self._draw(work, sampled, logits)
            if self._speculation is not None:
                runs = self._speculation.finish(work, logits, draw, tap)
                if on_layer is not None:
                    for layer in self._speculation.proposer.layer_ids:
                        on_layer(layer)
                if step.guess_count:
                    guesses = self._speculation.guess(work, step.guess_count)
                decoded = [request_id for request_id in step.decode if request_id not in refused]
                accepted = accepted_of(decoded, work.decodes, runs)
        elif step.copies:
            # One rank answers for all, and elsewhere the forward pass makes it wait for the others.
            self._model.context.parallel.wait_for_ranks(self._device)
        return PendingStep(
            step_id=step.step_id,
            clock=self._clock,
            started_at=started_at,
            due=due,
            refused=refused,
            ran=[request_id for request_id in due if request_id not in refused],
            draw=draw,
            scored=scored,
            accepted=accepted,
            guesses=guesses,
        )

    # ---- what changed ----------------------------------------------------------------------------

    def _retire(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            if self._refused.pop(request_id, None) is None:
                slot = self._sequences.remove(request_id)
                self._sampler.remove(slot)
                self._prompt_scores.remove(slot)
                if self._speculation is not None:
                    self._speculation.remove(slot)
                del self._sampling[slot]

    def _introduce(self, new: NewSequence) -> None:
        tokens = np.array(new.token_ids, dtype=np.int64)
        reason = why_refused(tokens, new.prompt_count, new.sampling, self._vocab_size)
        if new.sampling.grammar is not None and self._lacks_grammars:
            reason = reason or "a grammar: this server has no tokenizer to follow it with"
        if reason is not None:
            self._refused[new.request_id] = reason
            return
        token_ids = torch.from_numpy(tokens)
        slot = self._sequences.add(new.request_id, token_ids)
        self._sampler.add(slot, new.sampling, token_ids, new.prompt_count)
        self._sampling[slot] = (new.sampling, new.prompt_count)
        self._prompt_scores.add(slot, new.sampling, new.prompt_count)
        if self._speculation is not None:
            self._speculation.add(slot, new.sampling, token_ids, new.proposals)

    def _introduce_samples(self, chunk: PrefillChunk) -> None:
        """Sequences that go on from a chunk's own, each as if it had come with the same tokens."""
        for sample in chunk.samples:
            reason = self._refused.get(chunk.request_id)
            if reason is not None:
                self._refused[sample.request_id] = reason
                continue
            slot = self._sequences.slot(chunk.request_id)
            token_ids = self._sequences.tokens(slot)
            shared, prompt_count = self._sampling[slot]
            sampling = msgspec.structs.replace(shared, seed=sample.seed)
            slot = self._sequences.add(sample.request_id, token_ids)
            self._sampler.add(slot, sampling, token_ids, prompt_count)
            self._sampling[slot] = (sampling, prompt_count)
            if self._speculation is not None:
                self._speculation.add(slot, sampling, token_ids)

    def _grant(self, grants: list[PageGrant]) -> None:
        by_group: list[list[tuple[int, int, list[int]]]] = [[] for _ in self._pool.groups]
        for grant in grants:
            if grant.request_id in self._refused or not grant.page_ids:
                continue
            page_max = self._pool.page_counts[grant.group]
            assert min(grant.page_ids) >= 1 and max(grant.page_ids) <= page_max, grant
            slot = self._sequences.slot(grant.request_id)
            by_group[grant.group].append((slot, grant.first_index, grant.page_ids))
        for group, group_grants in enumerate(by_group):
            self._sequences.grant(group, group_grants)

    def _hear_tokens(self, step: Step) -> None:
        """Append what the last stage drew in the step before; new sequences bring theirs along."""
        new = {sequence.request_id for sequence in step.new} | self._refused.keys()
        told = [
            (self._sequences.slot(request_id), token)
            for request_id, token in zip(step.decode, step.decode_tokens, strict=True)
            if request_id not in new
        ]
        slots = np.array([slot for slot, _ in told], dtype=np.int64)
        tokens = np.array([token for _, token in told], dtype=np.int64)
        index, drawn = upload(self._device, slots, tokens)
        self._sequences.append(slots, index, drawn)

    # ---- the forward pass ------------------------------------------------------------------------

    def _plan(self, step: Step) -> StepWork:
        chunks = [chunk for chunk in step.chunks if chunk.request_id not in self._refused]
        chunk_slots = self._sequences.slots([chunk.request_id for chunk in chunks])
        drawing = self._sequences.slots([one for chunk in chunks for one in chunk.drawing])
        for chunk, slot in zip(chunks, chunk_slots, strict=True):
            length = self._sequences.lengths[slot]
            assert 0 <= chunk.start < chunk.stop <= length, (chunk, length)
            assert not chunk.is_last or chunk.stop == length, (chunk, length)
        decodes = self._plan_decodes(step)
        return StepWork(
            chunks=chunks,
            chunk_slots=chunk_slots,
            decodes=decodes,
            sampled_slots=np.concatenate((drawing, decodes.slots)),
            prompt_rows=[
                rows
                for chunk, slot in zip(chunks, chunk_slots.tolist(), strict=True)
                if (rows := self._prompt_scores.rows(chunk, slot)) is not None
            ],
        )

    def _plan_decodes(self, step: Step) -> DecodeRows:
        counts = step.draft_counts or [0] * len(step.decode)
        decode = [
            (request_id, count)
            for request_id, count in zip(step.decode, counts, strict=True)
            if request_id not in self._refused
        ]
        slots = self._sequences.slots([request_id for request_id, _ in decode])
        if self._speculation is None:
            return DecodeRows(slots, [()] * len(slots))
        return self._speculation.propose(slots, [count for _, count in decode])

    def _upload(self, work: StepWork, rows: HostRows) -> _Inputs:
        """The tokens of prompts and proposals from the host, the latest from where they were
        drawn."""
        table, decodes = self._sequences, work.decodes
        positions = rows.lengths[len(work.chunks) :] - 1
        prompt = NO_TOKENS
        if work.chunks:
            spans = zip(work.chunks, work.chunk_slots.tolist(), strict=True)
            prompt = np.concatenate(
                [table.tokens(slot)[c.start : c.stop].numpy() for c, slot in spans]
            )
            ranges = [np.arange(chunk.start, chunk.stop) for chunk in work.chunks]
            positions = np.concatenate((*ranges, positions))
        uploaded = upload(
            self._device,
            prompt,
            positions,
            decodes.row_slots,
            decodes.tokens,
            decodes.depths,
            work.sampled_slots,
            work.logits_rows(),
            *rows.page_tables,
        )
        token_ids, device_positions, row_slots, proposed, depths, sampled, *rest = uploaded
        latest = table.latest.index_select(0, row_slots)
        if decodes.has_proposals:
            latest = torch.where(depths > 0, proposed, latest)
        if work.chunks:
            latest = torch.cat((token_ids, latest))
        logits_rows, *tables = rest
        return _Inputs(
            token_ids=latest,
            positions=device_positions,
            sampled_slots=sampled,
            # A pass that only decodes wants the logits of all its tokens, in their order.
            logits_rows=logits_rows if work.chunks else None,
            page_tables=tables,
        )

    def _forward(
        self, work: StepWork, on_layer: OnLayer | None, tap: HiddenTap | None
    ) -> tuple[Tensor, Tensor | None]:
        """(int64[R] of the sampled slots on the device, float32 logits of the rows that `StepWork`
        lists, None without the model's head)."""
        rows = self._rows(work)
        state_pages: dict[int, Sequence[int]] = {
            row: chunk.state_pages for row, chunk in enumerate(work.chunks) if chunk.state_pages
        }
        if self._speculation is not None:
            state_pages |= self._speculation.state_pages(work.decodes, len(work.chunks))
        is_plain = not work.chunks and not state_pages and tap is None
        if self._graphs is not None and is_plain:
            recorded = self._replay(self._graphs, work, rows, on_layer)
            if recorded is not None:
                return recorded
        inputs = self._upload(work, rows)
        batch = ForwardBatch.from_tensors(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            query_lengths=work.query_lengths,
            kv_lengths=rows.lengths.tolist(),
            page_tables=inputs.page_tables,
            groups=self._pool.groups,
            logits_rows=inputs.logits_rows,
            state_pages=state_pages,
        )
        return inputs.sampled_slots, self._model.forward(batch, self._pool, on_layer, tap)

    def _replay(
        self, graphs: DecodeGraphs, work: StepWork, rows: HostRows, on_layer: OnLayer | None
    ) -> tuple[Tensor, Tensor] | None:
        """As `_forward`, of a step that only decodes; None if no recording is large enough."""
        decodes, tokens = work.decodes, self._sequences.latest
        (sampled,) = upload(self._device, decodes.slots)
        index = sampled
        if decodes.has_proposals:
            slots, proposed, depths, index = upload(
                self._device,
                decodes.row_slots,
                decodes.tokens,
                decodes.depths,
                np.arange(len(decodes.depths)),
            )
            tokens = torch.where(depths > 0, proposed, tokens.index_select(0, slots))
        logits = graphs.run(rows, tokens, index)
        if logits is None:
            return None
        if on_layer is not None:
            for layer in self._model.layer_ids:
                on_layer(layer)
        return sampled, logits

    def _rows(self, work: StepWork) -> HostRows:
        """Lengths and pages of all sequences of a pass: chunks, then rows of decodes."""
        decodes = work.decodes
        chunk_stops = np.array([chunk.stop for chunk in work.chunks], dtype=np.int64)
        decode_lengths = self._sequences.lengths[decodes.row_slots] + decodes.depths
        lengths = np.concatenate((chunk_stops, decode_lengths))
        slots = np.concatenate((work.chunk_slots, decodes.row_slots))
        groups = range(len(self._pool.groups))
        tables = [self._sequences.page_table(group, slots, lengths) for group in groups]
        return HostRows(lengths, tuple(tables))

    # ---- the draw --------------------------------------------------------------------------------

    def _draw(self, work: StepWork, sampled: Tensor, logits: Tensor) -> Draw:
        """Of all rows that `StepWork` lists, those draw that every sampled slot has."""
        slots = work.sampled_slots
        rows = logits[: len(slots)]
        if work.decodes.has_proposals:
            (index,) = upload(self._device, work.first_logits)
            rows = logits[index]
        draw = self._sampler.draw(rows, slots, self._sequences.lengths[slots])
        self._sequences.append(slots, sampled, draw.tokens)
        return draw

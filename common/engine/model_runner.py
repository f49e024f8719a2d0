"""Runs one step of the scheduler on one rank: which tokens to compute, the forward pass, the draw.

A `Step` carries only changes; the state of running sequences lies here, as arrays. A step is
launched without waiting for the tokens of the step before it: they are on the device, where they
are needed, and every sequence's length is known. So on CUDA a step can be launched while another
one runs. Knows nothing of sockets, peers or the reasons for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from common.engine.pending_step import PendingStep, ScoredPrompt
from common.engine.prompt_scores import PromptScores
from common.engine.sampling.draw import Draw
from common.engine.sampling.sampler import Sampler
from common.engine.sampling.sampling_table import check_sampling
from common.engine.sequence_table import SequenceTable
from common.engine.step_work import StepWork
from common.grammar import GrammarCompiler
from common.protocol.worker import NewSequence, PageGrant, PrefillChunk, Step, StepDone
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
    """

    def __init__(
        self,
        model: CausalLm,
        pool: KvPool,
        clock: Clock,
        grammars: GrammarCompiler | None = None,
        graphs: DecodeGraphs | None = None,
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
        self._sampling: dict[int, tuple[SamplingParams, int]] = {}  # by slot, with prompt_count
        self._refused: dict[int, str] = {}

    @property
    def sequence_count(self) -> int:
        return len(self._sequences)

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
        if len(work.chunk_slots) or len(work.decode_slots):
            sampled, logits = self._forward(work, on_layer)
            if logits is None:
                return PendingStep(step.step_id, self._clock, started_at)
            row_count = len(work.sampled_slots)
            scored = self._prompt_scores.score(work, logits[row_count:])
            draw = self._draw(work, sampled, logits[:row_count])
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
        )

    # ---- what changed ----------------------------------------------------------------------------

    def _retire(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            if self._refused.pop(request_id, None) is None:
                slot = self._sequences.remove(request_id)
                self._sampler.remove(slot)
                self._prompt_scores.remove(slot)
                del self._sampling[slot]

    def _introduce(self, new: NewSequence) -> None:
        tokens = np.array(new.token_ids, dtype=np.int64)
        reason = _why_refused(tokens, new.prompt_count, new.sampling, self._vocab_size)
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
        self._sequences.append(slots, *upload(self._device, slots, tokens))

    # ---- the forward pass ------------------------------------------------------------------------

    def _plan(self, step: Step) -> StepWork:
        chunks = [chunk for chunk in step.chunks if chunk.request_id not in self._refused]
        decode = step.decode
        if self._refused:
            decode = [request_id for request_id in decode if request_id not in self._refused]
        chunk_slots = self._sequences.slots([chunk.request_id for chunk in chunks])
        decode_slots = self._sequences.slots(decode)
        drawing = self._sequences.slots([one for chunk in chunks for one in chunk.drawing])
        for chunk, slot in zip(chunks, chunk_slots, strict=True):
            length = self._sequences.lengths[slot]
            assert 0 <= chunk.start < chunk.stop <= length, (chunk, length)
            assert not chunk.is_last or chunk.stop == length, (chunk, length)
        return StepWork(
            chunks=chunks,
            chunk_slots=chunk_slots,
            decode_slots=decode_slots,
            sampled_slots=np.concatenate((drawing, decode_slots)),
            prompt_rows=[
                rows
                for chunk, slot in zip(chunks, chunk_slots.tolist(), strict=True)
                if (rows := self._prompt_scores.rows(chunk, slot)) is not None
            ],
        )

    def _upload(self, work: StepWork, rows: HostRows) -> _Inputs:
        """The tokens of prompts from the host, those of decodes from where they were drawn."""
        table = self._sequences
        positions = table.lengths[work.decode_slots] - 1
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
            work.decode_slots,
            work.sampled_slots,
            work.logits_rows(),
            *rows.page_tables,
        )
        token_ids, device_positions, decode_slots, sampled_slots, logits_rows, *tables = uploaded
        latest = table.latest.index_select(0, decode_slots)
        if work.chunks:
            latest = torch.cat((token_ids, latest))
        return _Inputs(
            token_ids=latest,
            positions=device_positions,
            sampled_slots=sampled_slots,
            # A pass that only decodes wants the logits of all its tokens, in their order.
            logits_rows=logits_rows if work.chunks else None,
            page_tables=tables,
        )

    def _forward(self, work: StepWork, on_layer: OnLayer | None) -> tuple[Tensor, Tensor | None]:
        """(int64[R] of the sampled slots on the device, float32 logits of the rows that `StepWork`
        lists, None without the model's head)."""
        rows = self._rows(work)
        if self._graphs is not None and not work.chunks:
            (index,) = upload(self._device, work.decode_slots)
            recorded = self._graphs.run(rows, self._sequences.latest, index)
            if recorded is not None:
                if on_layer is not None:
                    for layer in self._model.layer_ids:
                        on_layer(layer)
                return index, recorded
        inputs = self._upload(work, rows)
        query_lengths = [chunk.stop - chunk.start for chunk in work.chunks]
        query_lengths += [1] * len(work.decode_slots)
        batch = ForwardBatch.from_tensors(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            query_lengths=query_lengths,
            kv_lengths=rows.lengths.tolist(),
            page_tables=inputs.page_tables,
            groups=self._pool.groups,
            logits_rows=inputs.logits_rows,
            state_pages={
                row: chunk.state_pages for row, chunk in enumerate(work.chunks) if chunk.state_pages
            },
        )
        return inputs.sampled_slots, self._model.forward(batch, self._pool, on_layer)

    def _rows(self, work: StepWork) -> HostRows:
        """Lengths and pages of all sequences of a step, those of chunks too."""
        chunk_stops = np.array([chunk.stop for chunk in work.chunks], dtype=np.int64)
        lengths = np.concatenate((chunk_stops, self._sequences.lengths[work.decode_slots]))
        slots = np.concatenate((work.chunk_slots, work.decode_slots))
        groups = range(len(self._pool.groups))
        tables = [self._sequences.page_table(group, slots, lengths) for group in groups]
        return HostRows(lengths, tuple(tables))

    # ---- the draw --------------------------------------------------------------------------------

    def _draw(self, work: StepWork, sampled: Tensor, logits: Tensor) -> Draw:
        slots = work.sampled_slots
        draw = self._sampler.draw(logits, slots, self._sequences.lengths[slots])
        self._sequences.append(slots, sampled, draw.tokens)
        return draw


def _why_refused(
    token_ids: NDArray[np.int64], prompt_count: int, sampling: SamplingParams, vocab_size: int
) -> str | None:
    """A peer's values reach this far; a bad one must fail its own request, not the batch."""
    if len(token_ids) == 0 or not 1 <= prompt_count <= len(token_ids):
        return f"prompt_count={prompt_count}: must be in 1..{len(token_ids)}, the tokens given"
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        return f"token id {bad}: must be in 0..{vocab_size - 1}"
    return check_sampling(sampling, vocab_size)

"""Which sequences compute in the next step, and what a finished step means. Continuous batching.

Knows nothing of clients or peers: the two schedulers add sequences and take outcomes. One step is
in flight at a time. A step holds every sequence that decodes and, within a token budget, chunks of
prompts that are still being computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from common.protocol.worker import NewSequence, PrefillChunk, Step, StepDone
from common.request import (
    FinishKind,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    logprobs_nbytes,
)
from common.scheduling.sequence import PageAccount, Sequence

# What a step may tell of prompts: far below what a worker's message may have, and as much as a
# worker encodes between two beats.
STEP_LOGPROBS_NBYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """chunk_token_max: prompt tokens per step. running_max: sequences that compute at a time.
    sequence_token_max: tokens a sequence may reach (context length or pool, whichever is less)."""

    chunk_token_max: int
    running_max: int
    sequence_token_max: int
    eos_token_ids: frozenset[int]


class ChunkDone(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a prompt are computed."""

    sequence: Sequence
    start: int
    stop: int
    is_last: bool
    prompt_logprobs: bytes


class TokenDone(msgspec.Struct, frozen=True):
    """A sequence has a new token at its end; `finish` says whether it was the last one."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None


@dataclass(slots=True)
class StepOutcome:
    """What a step brought. Order: chunks first, then tokens, as the worker computed them."""

    chunks: list[ChunkDone] = field(default_factory=list)
    tokens: list[TokenDone] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)


class PlannedStep(msgspec.Struct):
    """The step to run, if any, and who had to give their pages back for it."""

    step: Step | None
    retracted: list[Sequence] = []


class Batcher:
    """Sequences that compute on this server's workers."""

    def __init__(self, account: PageAccount, limits: BatchLimits) -> None:
        self._account = account
        self.limits = limits
        self._prompts: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._retired: list[int] = []
        self._leaving: list[Sequence] = []
        self._in_flight: Step | None = None
        self._next_step_id = 1
        self.step_count = 0

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def prompt_count(self) -> int:
        return len(self._prompts)

    @property
    def is_computing(self) -> bool:
        return self._in_flight is not None

    @property
    def has_room(self) -> bool:
        """Whether one more sequence may compute."""
        return len(self._running) + len(self._prompts) < self.limits.running_max

    @property
    def uncomputed_token_count(self) -> int:
        """Prompt tokens that are waiting for their chunk."""
        return sum(len(s.token_ids) - s.computed_count for s in self._prompts.values())

    def add(self, sequence: Sequence) -> None:
        """Start computing. A sequence whose cache lacks only its last token decodes at once."""
        assert sequence.request_id not in self._running
        assert sequence.request_id not in self._prompts
        if sequence.output_count > 0 and sequence.computed_count == len(sequence.token_ids) - 1:
            self._running[sequence.request_id] = sequence
        else:
            self._prompts[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Stop computing and close the sequence once no step can touch its pages any more."""
        self.stop(sequence)
        if self.is_in_flight(sequence):
            self._leaving.append(sequence)
        else:
            self._account.close(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Compute no further; the pages stay with the caller, who asks `is_in_flight`."""
        self._prompts.pop(sequence.request_id, None)
        self._running.pop(sequence.request_id, None)
        if sequence.is_known:
            sequence.is_known = False
            self._retired.append(sequence.request_id)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether the step that is running may still write this sequence's pages."""
        step = self._in_flight
        if step is None:
            return False
        request_id = sequence.request_id
        return request_id in step.decode or any(c.request_id == request_id for c in step.chunks)

    # ---- planning --------------------------------------------------------------------------------

    def plan_step(self) -> PlannedStep:
        """The next step; none while one is in flight or if nobody has anything to compute."""
        if self._in_flight is not None:
            return PlannedStep(None)
        planned = PlannedStep(None)
        self._make_room(planned)
        chunks = self._plan_chunks()
        decode = list(self._running)
        if not chunks and not decode:
            return planned
        computing = [self._prompts[chunk.request_id] for chunk in chunks]
        computing += self._running.values()
        new: list[NewSequence] = []
        grants = []
        for sequence in computing:
            if not sequence.is_known:
                sequence.is_known = True
                new.append(_introduce(sequence))
            grants += sequence.take_grants()
        retired, self._retired = self._retired, []
        latest = [sequence.token_ids[-1] for sequence in self._running.values()]
        step = Step(self._next_step_id, new, grants, chunks, decode, retired, latest)
        self._next_step_id += 1
        self._in_flight = step
        planned.step = step
        return planned

    def _make_room(self, planned: PlannedStep) -> None:
        """Give every decoding sequence the page of its next token; retract the cheapest until all
        that are left have one."""
        for request_id in list(self._running):
            sequence = self._running.get(request_id)
            if sequence is not None:
                self._account.recycle(sequence)
            while sequence is not None and not self._account.grow(
                sequence, len(sequence.token_ids)
            ):
                victim = self._cheapest()
                planned.retracted.append(victim)
                self.remove(victim)
                sequence = self._running.get(request_id)

    def _cheapest(self) -> Sequence:
        """Whoever costs least to bring back: fewest tokens, latest arrival first among equals."""
        candidates = [*self._running.values(), *self._prompts.values()]
        return min(candidates, key=lambda s: (len(s.token_ids), -s.request_id))

    def _plan_chunks(self) -> list[PrefillChunk]:
        """First come, first served, within the token budget that the decodes leave, the window
        pages that a prompt has, and what a step may tell."""
        budget = max(1, self.limits.chunk_token_max - len(self._running))
        told_budget = STEP_LOGPROBS_NBYTES_MAX
        chunks: list[PrefillChunk] = []
        for sequence in self._prompts.values():
            if budget == 0:
                break
            self._account.recycle(sequence)
            start = sequence.computed_count
            token_nbytes = _told_nbytes(sequence)
            room = told_budget // token_nbytes if token_nbytes else budget
            if room == 0 and chunks:
                continue
            stop = min(self._account.chunk_stop_max(sequence), start + min(budget, max(1, room)))
            assert start < stop, f"request {sequence.request_id}: no page for token {start}"
            is_last = stop == len(sequence.token_ids)
            chunks.append(PrefillChunk(sequence.request_id, start, stop, is_last))
            budget -= stop - start
            told_budget -= token_nbytes * (stop - start)
        return chunks

    # ---- a finished step -------------------------------------------------------------------------

    def apply_done(self, done: StepDone) -> StepOutcome:
        """Take a finished step in. Sequences that left meanwhile give their pages back now."""
        step = self._in_flight
        assert step is not None and step.step_id == done.step_id
        self._in_flight = None
        self.step_count += 1
        for sequence in self._leaving:
            self._account.close(sequence)
        self._leaving = []

        outcome = StepOutcome()
        for chunk in step.chunks:
            self._finish_chunk(chunk, done, outcome)
        for request_id in step.decode:
            decoding = self._running.get(request_id)
            if decoding is not None:
                decoding.computed_count = len(decoding.token_ids)
        for request_id, token_id in zip(done.request_ids, done.token_ids, strict=True):
            sampled = self._running.get(request_id)
            if sampled is None:
                continue
            if request_id in done.failed:
                outcome.failed.append((sampled, done.failed[request_id]))
                continue
            sampled.token_ids.append(token_id)
            finish = self.finish_of(sampled)
            logprobs = done.logprobs.get(request_id)
            outcome.tokens.append(TokenDone(sampled, token_id, logprobs, finish))
        return outcome

    def _finish_chunk(self, chunk: PrefillChunk, done: StepDone, outcome: StepOutcome) -> None:
        sequence = self._prompts.get(chunk.request_id)
        if sequence is None:
            return
        sequence.computed_count = chunk.stop
        if chunk.is_last:
            del self._prompts[chunk.request_id]
            self._running[chunk.request_id] = sequence
            # Whoever sends the window now keeps no more than it.
            self._account.recycle(sequence)
        prompt_logprobs = done.prompt_logprobs.get(chunk.request_id, b"")
        outcome.chunks.append(
            ChunkDone(sequence, chunk.start, chunk.stop, chunk.is_last, prompt_logprobs)
        )

    def finish_of(self, sequence: Sequence) -> FinishReason | None:
        """Whether the last token of a sequence ends it."""
        sampling = sequence.sampling
        token_id = sequence.token_ids[-1]
        is_long = sequence.output_count > sampling.min_new_tokens or sampling.min_new_tokens == 0
        if is_long and self._is_stop(sampling, token_id):
            return FinishReason(FinishKind.STOP, matched=token_id)
        if sequence.output_count >= sampling.max_new_tokens:
            return FinishReason(FinishKind.LENGTH)
        if len(sequence.token_ids) >= self.limits.sequence_token_max:
            return FinishReason(FinishKind.LENGTH)
        return None

    def ends_too_early(self, sampling: SamplingParams, first_token: int) -> bool:
        """Whether a first token, drawn elsewhere, would have been held back here."""
        return sampling.min_new_tokens > 0 and self._is_stop(sampling, first_token)

    def _is_stop(self, sampling: SamplingParams, token_id: int) -> bool:
        is_eos = token_id in self.limits.eos_token_ids and not sampling.ignore_eos
        return is_eos or token_id in sampling.stop_token_ids


def _told_nbytes(sequence: Sequence) -> int:
    """What is told of every prompt token of a sequence at most."""
    sampling = sequence.sampling
    return logprobs_nbytes(sampling, 1) if sampling.logprob_start_len >= 0 else 0


def _introduce(sequence: Sequence) -> NewSequence:
    return NewSequence(
        sequence.request_id,
        list(sequence.token_ids),
        sequence.prompt_count,
        sequence.sampling,
    )

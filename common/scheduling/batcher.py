"""Which sequences compute in the next step, and what a finished step means. Continuous batching.

Knows nothing of clients or peers: the two schedulers add sequences and take outcomes. A step holds
every sequence that decodes and, within a token budget, chunks of prompts that are still being
computed. While one is in flight, the next may be sent, so that workers need not wait for it:

    step N       a  b  c            draws a token of each, not known yet
    step N + 1      b  c  d         a reaches its length with N. If N ends b, what is drawn here
                                    for b is dropped, and its pages come back after N + 1

A sequence whose cache came from elsewhere may find that as many compute as may: it is ready, holds
its pages, and joins the steps when another one leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec

from common.protocol.worker import (
    NewSequence,
    PageCopies,
    PageGrant,
    PrefillChunk,
    Step,
    StepDone,
)
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.blocks_under_way import BlocksUnderWay
from common.scheduling.chunks import is_passing, plan_chunks
from common.scheduling.fork_copies import ForkCopies
from common.scheduling.in_flight import Flight, InFlight
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import Match
from common.scheduling.proposals import Proposals
from common.scheduling.rates import StepRates
from common.scheduling.sequence import Sequence
from common.scheduling.step_checkpoints import StepCheckpoints
from common.scheduling.step_outcome import (
    ChunkDone,
    SamplesDrawn,
    StepOutcome,
    Undrawn,
)


class PlannedStep(msgspec.Struct):
    """The step to run, if any, and who had to give their pages back for it."""

    step: Step | None
    retracted: list[Sequence] = []


class Batcher:
    """Sequences that compute on this server's workers.

    unplanned_count: prompt tokens that are in no step yet. rates: of the steps that returned.
    proposals: tokens that steps verify ahead of sequences.
    shared_step_tokens: prompt tokens that a step may have which also decodes; None for no limit.
    """

    def __init__(
        self, account: PageAccount, limits: BatchLimits, rates: StepRates | None = None
    ) -> None:
        self._account = account
        self.limits = limits
        self._prompts: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._ready: dict[int, Sequence] = {}
        self._retired: list[int] = []
        self._leaving: list[Sequence] = []
        self._in_flight = InFlight()
        self._under_way = BlocksUnderWay(account)
        self._fork_copies = ForkCopies()
        self._step_checkpoints = StepCheckpoints(account)
        self.proposals = Proposals(account)
        self._next_step_id = 1
        self.unplanned_count = 0
        self.step_count = 0
        self.rates = rates or StepRates()
        self.shared_step_tokens: int | None = None

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def prompt_count(self) -> int:
        return len(self._prompts)

    @property
    def prompts(self) -> Iterable[Sequence]:
        """Those whose prompt is being computed."""
        return self._prompts.values()

    def sequences(self) -> Iterator[Sequence]:
        """All that are here."""
        return chain(self._running.values(), self._prompts.values(), self._ready.values())

    @property
    def ready_count(self) -> int:
        """Sequences that could decode and wait for a place in the steps."""
        return len(self._ready)

    @property
    def _place_count(self) -> int:
        """Places in the steps that are taken: a prompt takes those of its samples."""
        return len(self._running) + sum(s.sample_count for s in self._prompts.values())

    @property
    def is_full(self) -> bool:
        """Whether as many sequences compute as may, those that are ready included."""
        return self._place_count + len(self._ready) >= self.limits.running_max

    @property
    def is_computing(self) -> bool:
        return len(self._in_flight) > 0

    def has_room_for(self, token_count: int, priority: int = 0) -> bool:
        """Whether a prompt of so many tokens would be computed in one of the steps that may be sent
        next: they have room, or it passes those that fill them."""
        if self._place_count >= self.limits.running_max:
            return False
        budget = self.limits.in_flight_max * self.limits.chunk_token_max
        if self.unplanned_count < budget:
            return True
        ahead = [s for s in self._prompts.values() if s.left_count and s.priority >= priority]
        if sum(len(s.token_ids) - s.chunk_start for s in ahead) < budget:
            return True
        return is_passing([s.left_count for s in ahead], token_count, budget)

    def computes_prompt(self, sequence: Sequence) -> bool:
        return self._prompts.get(sequence.request_id) is sequence

    def find_writer(
        self, match: Match, digests: bytes, token_max: int
    ) -> tuple[Sequence, int] | None:
        """Who computes what comes behind a cached prefix; see `BlocksUnderWay.find`."""
        return self._under_way.find(match, digests, token_max)

    def stop_at(self, sequence: Sequence, token_count: int) -> None:
        """Another prompt waits for so many tokens of one that is computed."""
        cache = self._account.cache
        known = (*sequence.cuts, *sequence.making)
        if cache is not None and cache.needs_checkpoint and token_count not in known:
            sequence.cuts.append(token_count)
            self._under_way.note(sequence)

    def has_reached(self, sequence: Sequence, token_count: int) -> bool:
        """Whether others can go on from so many tokens of a sequence. Where that takes a
        checkpoint, the step behind those tokens makes it."""
        cache = self._account.cache
        if cache is not None and cache.needs_checkpoint:
            return sequence.computed_count > token_count
        return sequence.computed_count >= token_count

    @property
    def uncomputed_token_count(self) -> int:
        """Prompt tokens whose chunk has not returned."""
        return sum(len(s.token_ids) - s.computed_count for s in self._prompts.values())

    def add(self, sequence: Sequence) -> None:
        """Start computing. A sequence whose cache lacks only its last token decodes as soon as it
        has a place, but not where it leaves with its next one: there that is the last chunk, which
        is transferred.
        """
        assert not self.holds(sequence.request_id)
        lacks_only_last = sequence.computed_count == len(sequence.token_ids) - 1
        if lacks_only_last and sequence.output_count > 0 and not self.limits.is_prompt_only:
            self._ready[sequence.request_id] = sequence
            self._fill_places()
        else:
            self._prompts[sequence.request_id] = sequence
            self.unplanned_count += len(sequence.token_ids) - sequence.chunk_start
            self._under_way.note(sequence)

    def add_samples(self, forked: list[tuple[Sequence, list[PageCopies]]], first: Sequence) -> None:
        """Samples of a prompt decode as soon as they have a place. What the others have to copy of
        the first one's pages is copied with the next step, whoever is in it."""
        self._fork_copies.add(first, forked)
        for sequence in (first, *(sequence for sequence, _ in forked)):
            assert not self.holds(sequence.request_id)
            self._ready[sequence.request_id] = sequence
        self._fill_places()

    def retire(self, request_ids: Iterable[int]) -> None:
        """Samples that workers know end with their first token."""
        self._retired += request_ids

    def holds(self, request_id: int) -> bool:
        """Whether a request's sequence is here."""
        return any(request_id in table for table in (self._running, self._prompts, self._ready))

    def _fill_places(self) -> None:
        """Who is ready joins the steps as far as there are places: the most urgent, and of equals
        the first one that came."""
        while self._ready and self._place_count < self.limits.running_max:
            request_id = max(self._ready, key=lambda one: self._ready[one].priority)
            self._running[request_id] = self._ready.pop(request_id)

    def remove(self, sequence: Sequence) -> None:
        """Stop computing and close the sequence once no step can touch its pages any more."""
        self.stop(sequence)
        self._leaving.append(sequence)
        self._close_left()

    def _close_or_wait(self, sequence: Sequence) -> None:
        if self._fork_copies.drop(sequence):
            self._account.cached.leave_nothing(sequence)
        if self.is_in_flight(sequence) or self._fork_copies.is_source(sequence):
            self._leaving.append(sequence)
        else:
            self._account.close(sequence)

    def _close_left(self) -> None:
        """Take back the pages that no step touches any more. Who is copied by one that leaves as
        well came before that one."""
        leaving, self._leaving = self._leaving[::-1], []
        for sequence in leaving:
            self._close_or_wait(sequence)
        self._leaving.reverse()

    def stop(self, sequence: Sequence) -> None:
        """Compute no further; the pages stay with the caller, who asks `is_in_flight`."""
        if self._prompts.pop(sequence.request_id, None) is not None:
            self.unplanned_count -= len(sequence.token_ids) - sequence.chunk_start
            self._under_way.forget(sequence)
        self._running.pop(sequence.request_id, None)
        self._ready.pop(sequence.request_id, None)
        if sequence.is_known:
            sequence.is_known = False
            self._retired.append(sequence.request_id)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a step that has not returned may still touch this sequence's pages."""
        return self._in_flight.touches(sequence)

    # ---- planning --------------------------------------------------------------------------------

    def plan_step(self) -> PlannedStep:
        """The next step; none if there is nothing to compute, or as many are in flight as may
        be. To be called until there is none."""
        if len(self._in_flight) >= self.limits.in_flight_max:
            return PlannedStep(None)
        self._fill_places()
        if len(self._in_flight):
            return PlannedStep(self._plan_ahead())
        planned = PlannedStep(None)
        standing = self._make_room(planned)
        decoding = [one for one in self._running.values() if one not in standing]
        counts = self.proposals.count(decoding, self.limits)
        chunks = self._plan_chunks(len(decoding) + sum(counts))
        planned.step = self._begin(chunks, decoding, counts)
        return planned

    def _plan_ahead(self) -> Step | None:
        """The step behind the one that is in flight, if waiting would not make a better one.

        No request is retracted for it, and no prompt that is here gets a smaller chunk or a later
        place: where pages are short, those that a sequence gives back when it ends now may do. A
        step of prompts alone is full, for a prompt that comes now would have joined it; only one
        that would have passed the others waits for a step more.
        """
        decoding = self._decoding_ahead()
        for sequence in (*decoding, *self._prompts.values()):
            self._account.recycle(sequence)
        if any(map(self._lacks_window, self._prompts.values())):
            return None
        chunks = self._plan_chunks(len(decoding))
        prompt_token_count = sum(chunk.stop - chunk.start for chunk in chunks)
        if not decoding and prompt_token_count < self.limits.chunk_token_max:
            return None
        if not self._account.grow_all(decoding):
            return None
        return self._begin(chunks, decoding)

    def _decoding_ahead(self) -> list[Sequence]:
        """Who decodes once the step in flight has returned, unless that draws its end."""
        candidates = list(self._running.values())
        if not self.limits.is_prompt_only:
            candidates += [s for s in self._prompts.values() if s.pending_count]
        return [s for s in candidates if not self.limits.is_at_end(s, s.token_count)]

    def _lacks_window(self, sequence: Sequence) -> bool:
        """Whether a prompt's next chunk waits for pages that its last one still reads."""
        stop = min(len(sequence.token_ids), sequence.chunk_start + self.limits.chunk_token_max)
        return self._account.chunk_stop_max(sequence) < stop

    def _begin(
        self,
        chunks: list[PrefillChunk],
        decoding: list[Sequence],
        draft_counts: list[int] | None = None,
    ) -> Step | None:
        """The step of these, which is in flight from now on; None if there is nothing in it."""
        computing = [self._prompts[chunk.request_id] for chunk in chunks] + decoding
        if not computing:
            return None
        new: list[NewSequence] = []
        grants: list[PageGrant] = []
        copies, copying = self._fork_copies.take()
        checkpoints = self._step_checkpoints.begin(chunks, self._prompts, decoding)
        chunks = self._step_checkpoints.keep_inside(chunks, self._prompts, checkpoints)
        for sequence in computing:
            if sequence.page_copies:
                copies += sequence.take_copies()
            if not sequence.is_known:
                sequence.is_known = True
                new.append(sequence.introduce())
            grants += sequence.take_grants()
        retired, self._retired = self._retired, []
        decode = [sequence.request_id for sequence in decoding]
        # Ahead of the step that draws them they are not known, so then no sequence may need them.
        is_told = self.limits.in_flight_max == 1
        latest = [sequence.token_ids[-1] for sequence in decoding] if is_told else []
        step = Step(
            self._next_step_id,
            new,
            grants,
            chunks,
            decode,
            retired,
            latest,
            copies,
            draft_counts or [],
            self.limits.guess_count,
        )
        self._next_step_id += 1
        self.unplanned_count -= sum(chunk.stop - chunk.start for chunk in chunks)
        self._in_flight.begin(step, computing, checkpoints, copying)
        return step

    def _make_room(self, planned: PlannedStep) -> list[Sequence]:
        """Give every decoding sequence the page of its next token; retract the cheapest until all
        that are left have one. Returns those that stand still until what is in it is saved."""
        standing: list[Sequence] = []
        for request_id in list(self._running):
            sequence = self._running.get(request_id)
            if sequence is not None:
                self._account.recycle(sequence)
            while sequence is not None:
                needs = self._account.needs(sequence.spans, len(sequence.token_ids))
                if self._account.saves_for(needs):
                    standing.append(sequence)
                    break
                if self._account.grow(sequence, len(sequence.token_ids)):
                    break
                victim = self._cheapest()
                planned.retracted.append(victim)
                self.remove(victim)
                sequence = self._running.get(request_id)
        return standing

    def _cheapest(self) -> Sequence:
        """The least urgent sequence; of equals the one that costs least to bring back: the fewest
        tokens, then the latest. One that the next step copies pages of would not give them back
        before that."""

        def cost(one: Sequence) -> tuple[bool, int, int, int]:
            is_source = self._fork_copies.is_source(one)
            return is_source, one.priority, len(one.token_ids), -one.request_id

        return min(self.sequences(), key=cost)

    def _plan_chunks(self, decode_count: int) -> list[PrefillChunk]:
        """Within the token budget that the decodes and what is proposed for them leave."""
        budget = max(1, self.limits.chunk_token_max - decode_count)
        if decode_count and self.shared_step_tokens is not None:
            budget = min(budget, self.shared_step_tokens)
        return plan_chunks(self._account, self._prompts.values(), budget)

    # ---- a finished step -------------------------------------------------------------------------

    def apply_done(self, done: StepDone) -> StepOutcome:
        """Take a finished step in. Sequences that left meanwhile give their pages back now, and
        what was drawn for them is dropped."""
        flight = self._in_flight.end(done)
        self.step_count += 1
        prompt_token_count = sum(chunk.stop - chunk.start for chunk in flight.step.chunks)
        self.rates.note(prompt_token_count, len(flight.step.decode), done.seconds)
        for sequence in flight.sequences.values():
            if sequence.checkpoint is not None:
                self._account.cached.note_copied(sequence)
        for request_id in done.failed:
            self._account.cached.withdraw(flight.owner_of(request_id))
        outcome = StepOutcome()
        for chunk in flight.step.chunks:
            self._finish_chunk(flight, chunk, done, outcome)
        for sequence, checkpoint in flight.checkpoints:
            self._account.cached.end_checkpoint(sequence, checkpoint)
        for request_id, token_id in zip(done.request_ids, done.token_ids, strict=True):
            sampled = self._still_running(flight, request_id)
            if sampled is None:
                continue
            if request_id in done.failed:
                outcome.failed.append(Undrawn.of(sampled, request_id, done))
                continue
            outcome.tokens.append(self.proposals.append(sampled, token_id, done, self.limits))
        self._close_left()
        return outcome

    def _still_running(self, flight: Flight, request_id: int) -> Sequence | None:
        """The sequence that a step computed, unless it has left since. A sample is none yet."""
        sequence = flight.sequences.get(request_id)
        if sequence is None:
            return None
        return sequence if self._running.get(request_id) is sequence else None

    def _finish_chunk(
        self, flight: Flight, chunk: PrefillChunk, done: StepDone, outcome: StepOutcome
    ) -> None:
        """Its blocks can be found from now on. Should they turn out bad with the last chunk, those
        who read them come out bad as well."""
        sequence = flight.sequences[chunk.request_id]
        if self._prompts.get(chunk.request_id) is not sequence:
            self.retire(sample.request_id for sample in chunk.samples)
            return
        self._account.cached.remember(sequence)
        self._under_way.note(sequence)
        if chunk.is_last:
            self._under_way.forget(sequence)
            del self._prompts[chunk.request_id]
            if not chunk.samples:
                self._running[chunk.request_id] = sequence
            # A sequence that sends its window now keeps no more than it.
            self._account.recycle(sequence)
        prompt_logprobs = done.prompt_logprobs.get(chunk.request_id, b"")
        outcome.chunks.append(
            ChunkDone(sequence, chunk.start, chunk.stop, chunk.is_last, prompt_logprobs)
        )
        if chunk.samples:
            self._finish_samples(sequence, chunk.drawing, done, outcome)

    def _finish_samples(
        self, sequence: Sequence, request_ids: list[int], done: StepDone, outcome: StepOutcome
    ) -> None:
        """All of them draw from one row: where one fails, all do."""
        failed = [request_id for request_id in request_ids if request_id in done.failed]
        if failed:
            self.retire(request_ids)
            outcome.failed.append(Undrawn.of(sequence, failed[0], done))
            return
        drawn = dict(zip(done.request_ids, done.token_ids, strict=True))
        tokens = {request_id: drawn[request_id] for request_id in request_ids}
        told = {one: done.logprobs[one] for one in request_ids if one in done.logprobs}
        outcome.samples.append(SamplesDrawn(sequence, tokens, told))

"""Every request of the prefill server: table, queue, deadlines, and each change of its state.

One method per row of `PREFILL_TABLE`; nothing else assigns to a request. The client is answered as
soon as the end is known. Pages come back, and the decode server gets its one terminal message, only
when no step and no put of the request is outstanding. Decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List

import msgspec

from common.failures import Failure
from common.protocol.frontend import Failed, Submit, Tokens, Traced
from common.protocol.worker import SampleDraw
from common.request import (
    CHUNK_MARK_COUNT_MAX,
    CachedTokens,
    Claim,
    FinishKind,
    FinishReason,
    TokenLogprobs,
)
from common.scheduling.batcher import Batcher
from common.scheduling.deadlines import Deadlines
from common.scheduling.fair_share import OUTPUT_TOKEN_COST
from common.scheduling.page_account import PageAccount
from common.scheduling.peers import Outbox
from common.scheduling.prefix_cache import Match
from common.scheduling.sequence import Sequence
from common.scheduling.step_outcome import ChunkDone
from common.scheduling.transitions import PrefillEvent, PrefillState, next_prefill_state
from common.transfers.credits import Credits
from common.transfers.outgoing import ALL_COMPUTED, Outgoing, OutgoingTransfer
from prefill_server.queue import PromptQueue
from prefill_server.request import PrefillRequest

COUNTED = (
    *("finished", "transfer_failed", "bootstrap_failed", "aborted", "timed_out"),
    *("hold_expired",),
)
ENDED = (PrefillState.DRAINING, PrefillState.FINISHED, PrefillState.FAILED)
# A held cache is given up for another request's need after this long, not before.
UNDISTURBED_S = 5.0


class Requests:
    """Owner of every `PrefillRequest`. A request is in `queue` while it waits to be computed."""

    def __init__(
        self,
        account: PageAccount,
        batcher: Batcher,
        outgoing: Outgoing,
        credits: Credits,
        outbox: Outbox,
    ) -> None:
        self._account = account
        self._batcher = batcher
        self._outgoing = outgoing
        self._credits = credits
        self._outbox = outbox
        self._by_id: dict[int, PrefillRequest] = {}
        self._by_client: dict[int, PrefillRequest] = {}
        self._by_room: dict[int, PrefillRequest] = {}
        # In the order in which they were computed; those that ended stay until they are first.
        self._held: deque[PrefillRequest] = deque()
        self._next_id = 1
        self.queue = PromptQueue()
        self.deadlines = Deadlines()
        self.counters = dict.fromkeys(COUNTED, 0.0)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: int | None) -> PrefillRequest | None:
        return self._by_id.get(request_id) if request_id is not None else None

    def of_client(self, client_id: int) -> PrefillRequest | None:
        return self._by_client.get(client_id)

    def of_room(self, room: int) -> PrefillRequest | None:
        return self._by_room.get(room)

    @property
    def held_count(self) -> int:
        return sum(request.state is PrefillState.HELD for request in self._by_id.values())

    def take_expired(self, now: float) -> list[PrefillRequest]:
        """Requests whose time budget is used up."""
        late = [self.get(request_id) for request_id in self.deadlines.take_expired(now)]
        return [one for one in late if one is not None and one.deadline <= now]

    def oldest_held(self, now: float) -> PrefillRequest | None:
        """The cache to give up if another request waits for its pages: it is held longest, and its
        decode server had time to ask. Computing it again costs less than a server that stands."""
        while self._held and self._held[0].state is not PrefillState.HELD:
            self._held.popleft()
        if not self._held or now - self._held[0].computed_at < UNDISTURBED_S:
            return None
        return self._held[0]

    # ---- they come -------------------------------------------------------------------------------

    def submit(self, submit: Submit, room: int, now: float, *, is_ahead: bool) -> PrefillRequest:
        """A client's request, which waits for a decode server to ask for it; or is computed ahead
        of that."""
        request = PrefillRequest(
            request_id=self._take_id(),
            clients=dict(enumerate(submit.samples)),
            seeds=[sample.seed for sample in submit.samples],
            token_ids=submit.token_ids,
            prompt_count=len(submit.token_ids),
            sampling=submit.sampling,
            arrived_at=now,
            deadline=now + submit.budget_s,
            digests=submit.prefix_digests,
            room=room,
            is_ahead=is_ahead,
            origin=submit.origin,
            claim=submit.claim,
        )
        for sample in submit.samples:
            self._by_client[sample.request_id] = request
        self._by_room[room] = request
        self._add(request)
        return request

    def submit_asked(self, transfer: OutgoingTransfer, now: float) -> PrefillRequest:
        """A request that only its decode server knows of, which brought its tokens."""
        message = transfer.request
        assert message.sampling is not None, "checked when it came"
        request = PrefillRequest(
            request_id=self._take_id(),
            clients={},
            seeds=message.seeds or [message.sampling.seed],
            token_ids=message.token_ids,
            prompt_count=message.prompt_count,
            sampling=message.sampling,
            arrived_at=now,
            deadline=now + message.budget_ms / 1000,
            digests=message.prefix_digests,
            origin=message.origin,
            claim=message.claim,
        )
        self._add(request)
        return request

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _add(self, request: PrefillRequest) -> None:
        self._by_id[request.request_id] = request
        self.deadlines.add(request.request_id, request.deadline)

    # ---- rows of the table -----------------------------------------------------------------------

    def queue_ahead(self, request: PrefillRequest, now: float) -> None:
        """WAITING -> QUEUED: it is computed before any decode server asks for it."""
        self._advance(request, PrefillEvent.AHEAD)
        request.queued_at = now
        self.queue.add(request)

    def pair(self, request: PrefillRequest, transfer: OutgoingTransfer, now: float) -> None:
        """WAITING -> QUEUED, or HELD -> SENDING: a decode server asks for it, and its time budget
        counts as well. Where the other half is traced, this one is part of that. What this half
        does not say of its claim, the other one does."""
        self._advance(request, PrefillEvent.PAIRED)
        own, asked = request.claim, transfer.request.claim
        request.claim = Claim(own.priority or asked.priority, own.client or asked.client)
        request.transfer = transfer
        transfer.owner = request.request_id
        parent = transfer.request.origin.trace_parent or request.origin.trace_parent
        request.origin = msgspec.structs.replace(request.origin, trace_parent=parent)
        request.deadline = min(request.deadline, now + transfer.request.budget_ms / 1000)
        self.deadlines.add(request.request_id, request.deadline)
        if request.uses_credit:
            self._credits.begin(transfer.peer)
        if request.state is PrefillState.QUEUED:
            request.queued_at = now
            self.queue.add(request)
            return
        assert request.sequence is not None
        request.paired_at = now
        pages = request.sequence.page_lists()
        token_count = len(request.token_ids)
        self._outgoing.send(transfer, pages, token_count, ALL_COMPUTED, is_final=True)
        self._outgoing.ask_digests(transfer, pages)

    def schedule(self, request: PrefillRequest, match: Match, now: float) -> None:
        """QUEUED -> PREFILLING, if there are pages. match: what is cached of its prompt. What of
        that the decode server lacks leaves at once."""
        tokens, sampling, digests = request.token_ids, request.sampling, request.digests
        sequence = self._account.open(
            request.request_id, list(tokens), request.prompt_count, sampling, digests, match
        )
        if sequence is None:
            request.short_since = request.short_since or now
            request.relief_seen = self._account.relief_count
            return
        self._advance(request, PrefillEvent.SCHEDULED)
        request.sequence = sequence
        if len(request.seeds) > 1:
            sequence.samples = [SampleDraw(self._take_id(), seed) for seed in request.seeds]
        request.cached_token_count = sequence.cached_count
        request.scheduled_at = now
        sequence.priority = request.claim.priority
        self.queue.discard(request)
        self.queue.share.charge(request.claim.client, len(tokens) - sequence.cached_count)
        self._batcher.add(sequence)
        if request.transfer is not None:
            # Of a block that is cached in part, the first step makes the rest.
            stop = self._account.cached.whole_blocks(sequence.cached_count)
            if stop > request.transfer.sent_token_count:
                pages = sequence.page_lists()
                self._outgoing.send(request.transfer, pages, stop, ALL_COMPUTED, is_final=False)

    def note_chunk(self, chunk: ChunkDone, now: float) -> None:
        """A chunk of a prompt is computed."""
        request = self._by_id[chunk.sequence.request_id]
        request.chunk_count += 1
        if len(request.chunk_ends_s) < CHUNK_MARK_COUNT_MAX:
            request.chunk_ends_s.append(now - request.scheduled_at)
        if chunk.prompt_logprobs:
            request.prompt_logprobs.append(chunk.prompt_logprobs)

    def note_computed(
        self,
        sequence: Sequence,
        tokens: List[int],
        logprobs: List[TokenLogprobs],
        now: float,
    ) -> PrefillRequest:
        """PREFILLING -> SENDING or HELD: the prompt is computed and its samples' first tokens are
        drawn. The client of a held cache is answered; the last layers of another may be on their
        way."""
        request = self._by_id[sequence.request_id]
        request.first_tokens = list(tokens)
        self.queue.share.charge(request.claim.client, len(tokens), OUTPUT_TOKEN_COST)
        request.first_logprobs = list(logprobs)
        request.computed_at = now
        self._batcher.stop(sequence)
        if request.is_ahead:
            self._advance(request, PrefillEvent.COMPUTED_AHEAD)
            self._held.append(request)
            self._answer(request, now)
            self._forget_clients(request)
            return request
        self._advance(request, PrefillEvent.LAST_CHUNK)
        assert request.transfer is not None
        self._outgoing.ask_digests(request.transfer, sequence.page_lists())
        return request

    def finish(self, request: PrefillRequest, now: float) -> None:
        """SENDING -> FINISHED: everything is flushed at the target."""
        transfer, sequence = request.transfer, request.sequence
        assert transfer is not None and sequence is not None and request.first_tokens
        self._advance(request, PrefillEvent.SETTLED)
        self._account.close(sequence)
        self.counters["finished"] += not request.is_self_test
        trace = request.trace(now)
        seen_by_target = trace.transfer
        if request.is_ahead:
            # A decode server did not wait for what was computed before it asked.
            seen_by_target = msgspec.structs.replace(
                trace.transfer, queue_s=0.0, prefill_s=0.0, chunk_count=0, chunk_ends_s=[]
            )
        self._outgoing.finish(
            transfer,
            request.first_tokens,
            seen_by_target,
            request.first_logprobs,
            request.prompt_logprobs,
            sequence.first_proposals,
        )
        self._answer(request, now)
        if not request.clients and not request.is_self_test:
            self._outbox.to_frontend(Traced(trace))
        self._forget(request)

    def _answer(self, request: PrefillRequest, now: float) -> None:
        """Each client's sample has its token, and no more here."""
        for place, trace in request.traces(now):
            self._outbox.to_frontend(
                Tokens(
                    trace.request_id,
                    [request.first_tokens[place]],
                    logprobs=request.first_logprobs[place : place + 1],
                    cached=CachedTokens(prefill=request.cached_token_count),
                    finish=FinishReason(FinishKind.LENGTH),
                    trace=trace,
                )
            )

    def split(self, request: PrefillRequest) -> list[PrefillRequest]:
        """The samples of a prompt that waits are asked for one by one, in rooms that follow its
        own: each but the first is a request from now on. Returns those, none of which waits in its
        room yet."""
        assert request.room is not None
        parts: list[PrefillRequest] = []
        for place, sample in list(request.clients.items()):
            if place == 0:
                continue
            del request.clients[place]
            seed, room = request.seeds[place], request.room + place
            part = dataclasses.replace(
                request,
                request_id=self._take_id(),
                clients={0: sample},
                seeds=[seed],
                sampling=msgspec.structs.replace(request.sampling, seed=seed),
                room=room,
            )
            self._by_client[sample.request_id] = part
            self._by_room[room] = part
            self._add(part)
            parts.append(part)
        request.seeds = request.seeds[:1]
        return parts

    def drop_client(
        self, request: PrefillRequest, client_id: int, failure: Failure, now: float
    ) -> bool:
        """A client leaves a prompt that others wait for as well; False if there are no others."""
        if len(request.clients) < 2:
            return False
        (place,) = (p for p, one in request.clients.items() if one.request_id == client_id)
        sample = request.clients.pop(place)
        del self._by_client[client_id]
        trace = request.trace(now, client_id, sample.origin)
        trace = msgspec.structs.replace(trace, status=failure.kind, message=failure.message)
        self._outbox.to_frontend(Failed.of(client_id, failure, trace))
        return True

    def fail(self, request: PrefillRequest, failure: Failure, now: float) -> None:
        """WAITING or QUEUED -> FAILED; PREFILLING, HELD or SENDING -> DRAINING. The first cause
        counts; a request that is ending already is left alone."""
        if request.state in ENDED:
            return
        request.failure = failure = request.failure or failure
        for _, trace in request.traces(now):
            self._outbox.to_frontend(Failed.of(trace.request_id, failure, trace))
        self.queue.discard(request)
        if request.sequence is not None:
            self._batcher.stop(request.sequence)
            if request.transfer is not None:
                self._outgoing.cancel(request.transfer)
        self._advance(request, PrefillEvent.CANCELLED)
        self.settle(request, now)

    def settle(self, request: PrefillRequest, now: float) -> None:
        """DRAINING -> FAILED, once no step and no put touches its pages any more."""
        sequence, failure, transfer = request.sequence, request.failure, request.transfer
        assert failure is not None
        if request.is_sending or (sequence is not None and self._batcher.is_in_flight(sequence)):
            return
        if sequence is not None:
            self._account.close(sequence)
            self._advance(request, PrefillEvent.SETTLED)
        kind = "bootstrap_failed" if failure.kind.is_bootstrap else failure.kind
        if kind in self.counters:
            self.counters[kind] += 1
        is_test = request.is_self_test
        trace = request.trace(now)
        if transfer is not None:
            self._outgoing.refuse(transfer, failure, now)
        if not request.clients and not is_test:
            self._outbox.to_frontend(Traced(trace))
        self._forget(request)

    # ---- helpers ---------------------------------------------------------------------------------

    def _advance(self, request: PrefillRequest, event: PrefillEvent) -> None:
        request.state = next_prefill_state(request.state, event)

    def _forget(self, request: PrefillRequest) -> None:
        del self._by_id[request.request_id]
        self.deadlines.forget(request.request_id)
        self.queue.discard(request)
        self._forget_clients(request)
        if request.room is not None:
            del self._by_room[request.room]
        if request.transfer is not None and request.uses_credit:
            self._credits.end(request.transfer.peer)

    def _forget_clients(self, request: PrefillRequest) -> None:
        """They are answered."""
        for sample in request.clients.values():
            del self._by_client[sample.request_id]
        request.clients = {}

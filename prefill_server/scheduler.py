"""Every decision of the prefill server: pairing, admission, chunks, sends, ends. A pure core.

Events in, effects out, time passed in. It is the only writer of request, page and peer state here.
Knows nothing of sockets, processes or tensors.
"""

from __future__ import annotations

from typing import assert_never

from common.protocol.digests import Digested
from common.protocol.frontend import (
    Cancel,
    Drain,
    Failed,
    FlushCache,
    FrontendToScheduler,
    GetState,
    State,
    Submit,
)
from common.protocol.peer import (
    Abort,
    Attach,
    Detached,
    Heartbeat,
    Hello,
    TransferRequest,
    Withdraw,
)
from common.protocol.worker import (
    Forgotten,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    SendSettled,
    StepDone,
    WorkerBeat,
    WorkerReady,
    WorkerToScheduler,
)
from common.scheduling.batcher import Batcher, BatchLimits, ChunkDone, TokenDone
from common.scheduling.events import (
    Effect,
    Event,
    FromFrontend,
    FromPeer,
    FromWorker,
    LinkRefused,
    PeerMessage,
    ProcessesGone,
    Tick,
)
from common.scheduling.facts import SchedulerLimits, ServerFacts
from common.scheduling.flush import answer_flush
from common.scheduling.peers import Condition, Outbox
from common.scheduling.sequence import PageAccount
from common.scheduling.silence import Pulse
from common.scheduling.transitions import PrefillEvent, PrefillState
from prefill_server.decode_peers import DecodePeers
from prefill_server.endings import Endings
from prefill_server.rendezvous import Rendezvous
from prefill_server.request import Failure, PrefillRequest
from prefill_server.requests import RequestTable
from prefill_server.reservations import Reservations
from prefill_server.sender import Sender

# A request that does not fit is passed over for smaller ones at most this long; then it is next.
PASSED_OVER_MAX_S = 2.0


class PrefillScheduler:
    """The prefill server's core. Call `handle` for every event and `schedule` after each."""

    def __init__(self, facts: ServerFacts, limits: SchedulerLimits) -> None:
        self._facts = facts
        self._limits = limits
        self._outbox = Outbox()
        self._peers = DecodePeers(facts, limits.pace, self._outbox)
        self._pulse = Pulse(facts.rank_count, limits.pace.stall_s)
        self._rendezvous = Rendezvous(limits.bootstrap_timeout_s)
        self._sender = Sender(facts.rank_count, self._outbox)
        self._table = RequestTable()
        self.account = PageAccount(
            facts.layout.groups,
            facts.page_counts,
            has_prefix_cache=limits.has_prefix_cache,
            chunk_token_max=limits.chunk_token_max,
        )
        self.request_token_max = min(facts.sequence_token_max, self.account.token_capacity)
        batch_limits = BatchLimits(
            limits.chunk_token_max,
            limits.running_max,
            self.request_token_max + 1,
            facts.eos_token_ids,
        )
        self._batcher = Batcher(self.account, batch_limits)
        self._endings = Endings(
            self._table,
            self.account,
            self._batcher,
            self._sender,
            self._rendezvous,
            self._peers,
            self._outbox,
        )
        self._reservations = Reservations(
            facts,
            self._table,
            self._rendezvous,
            self._sender,
            self._peers,
            self._endings,
            self._outbox,
            request_token_max=self.request_token_max,
            queue_max=limits.queue_max,
        )
        self._counters = dict.fromkeys(("requests", "stale_messages"), 0.0)

    @property
    def is_idle(self) -> bool:
        return not self._table

    # ---- the three calls -------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in; the effects are to be carried out in order."""
        match event:
            case FromFrontend(message=message):
                self._handle_frontend(message, now)
            case FromWorker(message=reply):
                self._handle_worker(reply, now)
            case FromPeer(link=link, message=peer_message):
                self._handle_peer(link, peer_message, now)
            case LinkRefused(reason=reason):
                self._peers.handle_link_refused(reason)
            case ProcessesGone(incarnation=incarnation):
                self._lose(incarnation, "its processes ended", now)
            case Tick():
                pass
            case _:
                assert_never(event)
        return self._outbox.take()

    def schedule(self, now: float) -> list[Effect]:
        """Look at the time, admit what fits, and start the next step if none runs."""
        self._expire(now)
        self._admit(now)
        planned = self._batcher.plan_step()
        assert not planned.retracted, "a prompt's pages are all there before it is computed"
        if planned.step is not None:
            self._outbox.to_workers(planned.step)
            for chunk in planned.step.chunks:
                request = self._table.get(chunk.request_id)
                assert request is not None
                self._sender.send_chunk(request, chunk, planned.step.step_id)
        is_busy = self._batcher.is_computing
        trouble = self._pulse.look(now, is_busy=is_busy)
        condition = Condition(
            self._pulse.progress,
            is_busy,
            self._load_tokens(),
            trouble,
            self._reservations.is_draining,
        )
        self._peers.send_heartbeats(now, condition)
        return self._outbox.take()

    def next_wakeup(self, now: float) -> float:
        """When `schedule` wants to be called even if nothing happens."""
        times = [self._table.deadlines.next_at, self._rendezvous.next_at]
        return min(
            [now + self._limits.pace.interval_s, *(time for time in times if time is not None)]
        )

    # ---- frontend --------------------------------------------------------------------------------

    def _handle_frontend(self, message: FrontendToScheduler, now: float) -> None:
        match message:
            case Submit():
                self._handle_submit(message, now)
            case Cancel():
                request = self._table.of_client(message.request_id)
                if request is not None:
                    self._endings.fail(request, Failure("aborted", message.reason, 499), now)
            case Drain():
                self._reservations.is_draining = True
                self._peers.hurry()
            case FlushCache():
                done = answer_flush(message, self.account, len(self._table))
                self._outbox.to_frontend(done)
            case GetState():
                self._outbox.to_frontend(self._state(message.call_id))
            case _:
                assert_never(message)

    def _handle_submit(self, submit: Submit, now: float) -> None:
        self._counters["requests"] += 1
        room = submit.bootstrap.room if submit.bootstrap is not None else None
        token_count = len(submit.token_ids)
        if room is None:
            self._refuse(submit, 400, "a prefill server needs bootstrap_room in the request")
        elif not 1 <= token_count <= self.request_token_max:
            limit = f"must be 1..{self.request_token_max}"
            self._refuse(submit, 400, f"prompt of {token_count} tokens: {limit}")
        elif len(self._table) >= self._limits.queue_max:
            self._refuse(submit, 503, f"queue full: {len(self._table)} requests")
        elif self._table.of_room(room) is not None:
            self._refuse(submit, 400, f"bootstrap_room={room}: already in use")
        elif (withdrawn := self._rendezvous.take_withdrawn(room, now)) is not None:
            kind, message = withdrawn.kind, withdrawn.message
            self._outbox.to_frontend(Failed(submit.request_id, withdrawn.status, kind, message))
        else:
            request = self._table.add(
                client_id=submit.request_id,
                token_ids=submit.token_ids,
                prompt_count=token_count,
                sampling=submit.sampling,
                budget_s=submit.budget_s,
                room=room,
                now=now,
            )
            reservation = self._rendezvous.offer(room, request, now)
            if reservation is not None:
                self._reservations.pair(request, reservation, now)

    def _refuse(self, submit: Submit, status: int, message: str) -> None:
        kind = "queue_full" if status == 503 else "bad_request"
        self._outbox.to_frontend(Failed(submit.request_id, status, kind, message))

    # ---- peers -----------------------------------------------------------------------------------

    def _handle_peer(self, link: str, message: PeerMessage, now: float) -> None:
        match message:
            case Hello() if self._pulse.trouble:
                pass  # it asks again, and is welcome once our own workers move
            case Hello():
                lost = self._peers.handle_hello(link, message, now)
                if lost is not None:
                    self._end_requests_of(lost, "the decode server dialled anew", now)
            case Attach():
                if self._peers.handle_attach(link, message, now):
                    self._sender.forget_unquiet(message.incarnation)
            case Heartbeat():
                self._peers.handle_heartbeat(link, message)
            case TransferRequest():
                self._reservations.handle(link, message, now)
            case Withdraw():
                self._reservations.handle_withdraw(link, message, now)
            case Abort():
                self._reservations.handle_abort(link, message, now)
            case Detached():
                if self._peers.handle_detached(link, message):
                    reason = f"it detached: {message.reason}"
                    self._end_requests_of(message.incarnation, reason, now)
            case _:
                self._counters["stale_messages"] += 1

    def _lose(self, incarnation: str, reason: str, now: float) -> None:
        if self._peers.lose(incarnation, reason):
            self._end_requests_of(incarnation, reason, now)

    def _end_requests_of(self, incarnation: str, reason: str, now: float) -> None:
        self._rendezvous.withdraw_peer(incarnation)
        for request in self._table:
            if request.reservation is not None and request.reservation.peer == incarnation:
                text = f"decode server {incarnation} was lost: {reason}"
                self._endings.fail(request, Failure("peer_lost", text, 500), now)

    # ---- workers ---------------------------------------------------------------------------------

    def _handle_worker(self, message: WorkerToScheduler, now: float) -> None:
        match message:
            case StepDone():
                self._handle_step(message, now)
            case WorkerBeat():
                self._pulse.apply_beat(message.rank, message.progress)
            case SendSettled():
                request = self._sender.apply_settled(message)
                if request is not None:
                    self._handle_settled(request, now)
                    if not message.is_quiet and request.reservation is not None:
                        text = f"the connection broke in a hand-over: {message.error}"
                        self._lose(request.reservation.peer, text, now)
            case Digested():
                digested = self._sender.apply_digested(message)
                if digested is not None:
                    self._handle_settled(digested, now)
            case PeerConnected():
                self._peers.handle_connected(message, now)
            case PeerFailed():
                self._lose(message.peer, f"rank {message.rank}: {message.reason}", now)
            case PeerClosed():
                self._peers.handle_closed(message.peer, message.rank)
            case PeerOpened() | WorkerReady() | Forgotten():
                self._counters["stale_messages"] += 1
            case _:
                assert_never(message)

    def _handle_step(self, done: StepDone, now: float) -> None:
        outcome = self._batcher.apply_done(done)
        for chunk in outcome.chunks:
            self._handle_chunk(chunk)
        for sequence, reason in outcome.failed:
            failed = self._table.get(sequence.request_id)
            assert failed is not None
            self._endings.fail(failed, Failure("bad_logits", reason, 500), now)
        for token in outcome.tokens:
            self._handle_token(token, now)
        for request in self._table:
            if request.state is PrefillState.DRAINING:
                self._endings.finish_if_quiet(request, now)

    def _handle_chunk(self, chunk: ChunkDone) -> None:
        request = self._table.get(chunk.sequence.request_id)
        assert request is not None
        request.prompt_logprobs += chunk.prompt_logprobs

    def _handle_token(self, token: TokenDone, now: float) -> None:
        """The prompt is computed and the first token drawn; the last layers may be on their way."""
        request = self._table.get(token.sequence.request_id)
        assert request is not None
        request.first_token = token.token_id
        request.first_logprobs = token.logprobs
        request.computed_at = now
        self._batcher.stop(token.sequence)
        self.account.remember(token.sequence)
        request.advance(PrefillEvent.LAST_CHUNK)
        self._sender.ask_digests(request)
        self._handle_settled(request, now)

    def _handle_settled(self, request: PrefillRequest, now: float) -> None:
        if request.state is PrefillState.DRAINING:
            self._endings.finish_if_quiet(request, now)
        elif request.failure is not None:
            self._endings.fail(request, request.failure, now)
        elif request.state is PrefillState.SENDING and not request.is_on_its_way:
            self._endings.finish(request, now)

    # ---- time and admission ----------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for request_id in self._table.deadlines.take_expired(now):
            request = self._table.get(request_id)
            if request is not None and request.deadline <= now:
                failure = Failure("timed_out", "the request's time budget is used up", 504)
                self._endings.fail(request, failure, now)
        for half in self._rendezvous.take_expired(now):
            failure = Failure("rendezvous_timeout", "the other half of the room never came", 500)
            if isinstance(half, PrefillRequest):
                self._endings.fail(half, failure, now)
            else:
                self._endings.reply_failed(half, failure)
        for incarnation, reason in self._peers.lost(now):
            self._lose(incarnation, reason, now)

    def _admit(self, now: float) -> None:
        """Start whoever fits, in order of arrival; nobody passes a request that waited too long."""
        for request in list(self._table.queue.values()):
            if not self._batcher.has_room:
                break
            # The sequence grows by the first token; the request keeps what it was asked to compute.
            tokens = list(request.token_ids)
            sequence = self.account.open(
                request.request_id, tokens, request.prompt_count, request.sampling
            )
            if sequence is None:
                if now - request.queued_at > PASSED_OVER_MAX_S:
                    break
                continue
            request.sequence = sequence
            request.cached_token_count = sequence.cached_count
            request.scheduled_at = now
            request.advance(PrefillEvent.SCHEDULED)
            del self._table.queue[request.request_id]
            self._batcher.add(sequence)

    # ---- what others may know --------------------------------------------------------------------

    def _load_tokens(self) -> int:
        queued = sum(len(request.token_ids) for request in self._table.queue.values())
        return queued + self._batcher.uncomputed_token_count

    def _state(self, call_id: int) -> State:
        return State(
            call_id=call_id,
            is_ready=True,
            queues={
                "bootstrap": self._rendezvous.request_count,
                "waiting": len(self._table.queue),
                "running": self._batcher.prompt_count,
                "inflight": self._sender.open_count,
                "reservations": self._rendezvous.reservation_count,
            },
            counters={
                **self._counters,
                **self._endings.counters,
                "stale_messages": self._counters["stale_messages"] + self._reservations.stale_count,
                "refused_peers": float(self._peers.refused_count),
                "refused_links": float(self._peers.refused_link_count),
            },
            page_groups=self.account.states(self._facts.layout),
            peers=self._peers.states(),
            step_count=self._batcher.step_count,
            workers=list(self._facts.workers),
            trouble=self._pulse.trouble,
        )

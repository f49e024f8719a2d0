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
    PeerMessage,
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
from common.scheduling.batcher import Batcher, ChunkDone, TokenDone
from common.scheduling.events import (
    Effect,
    Event,
    FromFrontend,
    FromPeer,
    FromWorker,
    FrontendBehind,
    LinkBroke,
    LinkDropped,
    LinkRefused,
    ProcessesGone,
    Stopping,
    Tick,
    UnreadableRequest,
    WorkersStopped,
)
from common.scheduling.facts import SchedulerLimits, ServerFacts
from common.scheduling.flush import Flushes
from common.scheduling.peers import Condition, Outbox
from common.scheduling.sequence import PageAccount
from common.scheduling.transitions import PrefillEvent, PrefillState
from common.scheduling.worker_health import WorkerHealth
from prefill_server.admission import Admission
from prefill_server.credits import Credits
from prefill_server.decode_peers import DecodePeers
from prefill_server.endings import Endings
from prefill_server.holds import Holds, expired
from prefill_server.rendezvous import NEVER_CAME, Rendezvous
from prefill_server.request import Failure, PrefillRequest
from prefill_server.requests import RequestTable
from prefill_server.reservations import Reservations
from prefill_server.sender import Sender
from prefill_server.submissions import Submissions
from prefill_server.transfer_health import TransferHealth


class PrefillScheduler:
    """The prefill server's core. Call `handle` for every event and `schedule` after each."""

    def __init__(self, facts: ServerFacts, limits: SchedulerLimits) -> None:
        self._facts = facts
        self._limits = limits
        self._outbox = Outbox()
        self._worker_health = WorkerHealth.of(facts, limits.pace)
        self._rendezvous = Rendezvous(limits.bootstrap_timeout_s)
        self._sender = Sender(facts, self._outbox)
        self._table = RequestTable()
        self._transfer_health = TransferHealth()
        self._trouble = ""
        self.account = PageAccount(
            facts.layout.groups,
            facts.page_counts,
            has_prefix_cache=limits.has_prefix_cache,
            chunk_token_max=limits.chunk_token_max,
        )
        self.request_token_max = min(facts.sequence_token_max, self.account.token_capacity)
        self._credits = Credits(limits.queue_max)
        self._peers = DecodePeers(
            facts,
            limits.pace,
            self._outbox,
            self._credits,
            request_token_max=self.request_token_max,
        )
        batch_limits = limits.of_batch(facts, self.request_token_max + 1, is_prompt_only=True)
        self._batcher = Batcher(self.account, batch_limits)
        self._flushes = Flushes(self.account, self._batcher, self._outbox)
        self._endings = Endings(
            self._table,
            self.account,
            self._batcher,
            self._sender,
            self._rendezvous,
            self._peers,
            self._credits,
            self._transfer_health,
            self._outbox,
        )
        self._holds = Holds(self._table, self._rendezvous, self._outbox)
        self._admission = Admission(
            self._table, self.account, self._batcher, self._holds, self._endings
        )
        self._reservations = Reservations(
            facts,
            self._table,
            self._rendezvous,
            self._sender,
            self._peers,
            self._credits,
            self._endings,
            self._holds,
            self._outbox,
            request_token_max=self.request_token_max,
            queue_max=limits.queue_max,
        )
        self._submissions = Submissions(
            self._table,
            self._rendezvous,
            self._reservations,
            self._holds,
            self._outbox,
            request_token_max=self.request_token_max,
            queue_max=limits.queue_max,
        )
        self._stale_count = 0

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
            case UnreadableRequest():
                self._reservations.refuse_unreadable(event)
            case LinkDropped(link=link, reason=reason):
                self._drop(link, reason, now)
            case LinkRefused(reason=reason):
                self._peers.handle_link_refused(reason)
            case WorkersStopped(ranks=ranks):
                self._worker_health.stopped_ranks = ranks
            case ProcessesGone(incarnation=incarnation):
                self._lose(incarnation, "its processes ended", now)
            case Tick() | LinkBroke():
                pass
            case Stopping():
                self._leave()
            case FrontendBehind():
                pass  # a request has one token here, and a frontend that lags asks for no more
            case _:
                assert_never(event)
        return self._outbox.take()

    def schedule(self, now: float) -> list[Effect]:
        """Look at the time, admit what fits, and send the steps that may be in flight."""
        self._flushes.look(len(self._table))
        self._expire(now)
        self._admission.admit(now)
        self._send_steps()
        is_busy = self._batcher.is_computing
        trouble = self._worker_health.look(now, is_busy=is_busy)
        condition = Condition(
            self._worker_health.progress,
            is_busy,
            trouble,
            self._reservations.is_draining,
            queued_token_count=self._admission.load_tokens,
        )
        self._peers.hurry(self._credits.look(self._peers.connected_ones, len(self._table)))
        self._peers.send_heartbeats(now, condition)
        self._look_at_transfers(now)
        return self._outbox.take()

    def _send_steps(self) -> None:
        while True:
            planned = self._batcher.plan_step()
            assert not planned.retracted, "a prompt's pages are all there before it is computed"
            if planned.step is None:
                return
            self._outbox.to_workers(planned.step)
            for chunk in planned.step.chunks:
                request = self._table.get(chunk.request_id)
                assert request is not None
                if not request.is_ahead:
                    self._sender.send_chunk(request, chunk, planned.step.step_id)

    def _look_at_transfers(self, now: float) -> None:
        """Peers are not told: each knows its own, and who gave this server up could not try it."""
        before = self._trouble
        self._trouble = self._transfer_health.look(self._peers.connected_ones, now)
        if bool(before) != bool(self._trouble):
            text = self._trouble or "transfers are not known to fail any more"
            self._outbox.report(text, is_warning=bool(self._trouble))

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
                self._submissions.handle(message, now)
            case Cancel():
                request = self._table.of_client(message.request_id)
                if request is not None:
                    self._endings.fail(request, Failure("aborted", message.reason, 499), now)
            case Drain():
                self._reservations.is_draining = True
                self._peers.hurry()
            case FlushCache():
                self._flushes.handle(message, len(self._table))
            case GetState():
                self._outbox.to_frontend(self._state(message.call_id))
            case _:
                assert_never(message)

    # ---- peers -----------------------------------------------------------------------------------

    def _handle_peer(self, link: str, message: PeerMessage, now: float) -> None:
        match message:
            case Hello() if self._worker_health.trouble:
                pass  # it asks again, and is welcome once our own workers move
            case Hello():
                lost = self._peers.handle_hello(link, message, now)
                if lost is not None:
                    self._end_requests_of(lost, "the decode server dialled anew", now)
            case Attach():
                self._peers.handle_attach(link, message, now)
            case Heartbeat():
                self._peers.handle_heartbeat(link, message)
            case TransferRequest():
                self._reservations.handle(link, message, now)
            case Withdraw():
                self._reservations.handle_withdraw(link, message, now)
            case Abort():
                self._reservations.handle_abort(link, message, now)
            case Detached():
                if self._peers.handle_detached(link, message, now):
                    reason = f"it detached: {message.reason}"
                    self._end_requests_of(message.incarnation, reason, now)
            case _:
                self._stale_count += 1

    def _lose(self, incarnation: str, reason: str, now: float) -> None:
        if self._peers.lose(incarnation, reason, now):
            self._end_requests_of(incarnation, reason, now)

    def _drop(self, link: str, reason: str, now: float) -> None:
        """Nothing that a link says is heard any more: who spoke on it has to dial anew."""
        incarnation = self._peers.on_link(link)
        if incarnation is not None:
            self._lose(incarnation, f"its link is not listened to: {reason}", now)

    def _end_requests_of(self, incarnation: str, reason: str, now: float) -> None:
        failure = Failure("peer_lost", f"decode server {incarnation} was lost: {reason}", 500)
        self._rendezvous.withdraw_peer(incarnation, failure, now)
        for request in self._table:
            if request.reservation is not None and request.reservation.peer == incarnation:
                self._endings.fail(request, failure, now)

    # ---- workers ---------------------------------------------------------------------------------

    def _handle_worker(self, message: WorkerToScheduler, now: float) -> None:
        match message:
            case StepDone():
                self._handle_step(message, now)
            case WorkerBeat():
                self._worker_health.apply_beat(message.rank, message.progress)
            case SendSettled():
                request = self._sender.apply_settled(message)
                if request is not None:
                    self._handle_settled(request, now)
                    if not message.is_quiet and request.reservation is not None:
                        text = f"the connection broke in a transfer: {message.error}"
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
                self._stale_count += 1
            case _:
                assert_never(message)

    def _handle_step(self, done: StepDone, now: float) -> None:
        outcome = self._batcher.apply_done(done)
        for chunk in outcome.chunks:
            self._handle_chunk(chunk, now)
        for undrawn in outcome.failed:
            failed = self._table.get(undrawn.sequence.request_id)
            assert failed is not None
            failure = Failure(undrawn.kind, undrawn.reason, undrawn.status)
            self._endings.fail(failed, failure, now)
        for token in outcome.tokens:
            self._handle_token(token, now)
        for request in self._table:
            if request.state is PrefillState.DRAINING:
                self._endings.finish_if_quiet(request, now)

    def _handle_chunk(self, chunk: ChunkDone, now: float) -> None:
        request = self._table.get(chunk.sequence.request_id)
        assert request is not None
        request.note_chunk(now)
        if chunk.prompt_logprobs:
            request.prompt_logprobs.append(chunk.prompt_logprobs)

    def _handle_token(self, token: TokenDone, now: float) -> None:
        """The prompt is computed and the first token drawn; the last layers may be on their way."""
        request = self._table.get(token.sequence.request_id)
        assert request is not None
        request.first_token = token.token_id
        request.first_logprobs = token.logprobs
        request.computed_at = now
        self._batcher.stop(token.sequence)
        if request.is_ahead:
            reservation = self._holds.hold(request, now)
            if reservation is not None:
                self._reservations.pair(request, reservation, now)
            return
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

    # ---- time ------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for request_id in self._table.deadlines.take_expired(now):
            request = self._table.get(request_id)
            if request is not None and request.deadline <= now:
                failure = Failure("timed_out", "the request's time budget is used up", 504)
                is_held = request.state is PrefillState.HELD
                self._endings.fail(request, expired(request) if is_held else failure, now)
        for half in self._rendezvous.take_expired(now):
            if isinstance(half, PrefillRequest):
                self._endings.fail(half, expired(half), now)
            else:
                self._endings.reply_failed(half, NEVER_CAME)
        for incarnation, reason in self._peers.lost(now):
            self._lose(incarnation, reason, now)

    def _leave(self) -> None:
        peer_count = self._peers.leave()
        self._outbox.report_end(len(self._table), peer_count, self._endings.counters)

    # ---- what others may know --------------------------------------------------------------------

    def _state(self, call_id: int) -> State:
        return State(
            call_id=call_id,
            is_ready=True,
            queues={
                "bootstrap": self._rendezvous.request_count,
                "waiting": len(self._table.queue),
                "running": self._batcher.prompt_count,
                "inflight": self._sender.open_count,
                "held": sum(r.state is PrefillState.HELD for r in self._table),
                "reservations": self._rendezvous.reservation_count,
            },
            counters={
                **self._endings.counters,
                "requests": float(self._submissions.count),
                "followed": float(self._admission.followed_count),
                "stale_messages": float(self._stale_count + self._reservations.stale_count),
                "peers_lost": float(self._peers.lost_count),
                "refused_peers": float(self._peers.refused_count),
                "refused_links": float(self._peers.refused_link_count),
            },
            page_groups=self.account.states(self._facts.layout),
            peers=self._peers.states(),
            step_count=self._batcher.step_count,
            workers=list(self._facts.workers),
            trouble=self._worker_health.trouble or self._trouble,
        )

"""Every decision of the prefill server: pairing, admission, chunks, sends, ends. A pure core.

Events in, effects out, time passed in. Policies decide, `requests` and `transfers` write. Knows
nothing of sockets, processes or tensors.
"""

from __future__ import annotations

import random
from typing import assert_never

from common.failures import Failure, FailureKind
from common.protocol.frontend import (
    Cancel,
    Command,
    Continue,
    Drain,
    FlushCache,
    GetState,
    Pause,
    SetPeers,
    State,
    Submit,
)
from common.protocol.worker import (
    PagesMoved,
    StepDone,
    WorkerBeat,
    WorkerReady,
    WorkerReport,
)
from common.request import TokenLogprobs
from common.scheduling.batcher import Batcher
from common.scheduling.events import (
    DrainEnded,
    Effect,
    Event,
    FromFrontend,
    FromPeer,
    FromWorker,
    FrontendBehind,
    Stopping,
    Tick,
    WorkersStopped,
)
from common.scheduling.facts import SchedulerLimits, ServerFacts
from common.scheduling.flush import Flushes
from common.scheduling.host_tier import HostTier
from common.scheduling.page_account import account_of
from common.scheduling.pauses import Pauses
from common.scheduling.peers import Condition, Outbox
from common.scheduling.sequence import Sequence
from common.scheduling.told_prefixes import ToldPrefixes
from common.scheduling.transitions import PrefillState
from common.scheduling.worker_health import WorkerHealth
from common.transfers.credits import Credits
from common.transfers.incoming_transfer import CacheFailed, CacheReady
from common.transfers.introduction import Introduction
from common.transfers.outgoing import AskRefused, CacheAsked
from common.transfers.transfers import (
    AbortAsked,
    CacheOffered,
    RoomWithdrawn,
    SendProgressed,
    TargetLost,
    TransferEvent,
    Transfers,
)
from prefill_server.admission import Admission, GiveUpHeld, Schedule
from prefill_server.meetings import Meetings, failure_of_expired
from prefill_server.request import PrefillRequest
from prefill_server.requests import Requests
from prefill_server.returns import Returns


class PrefillScheduler:
    """The prefill server's core. Call `handle` for every event and `schedule` after each.

    links: addresses of servers to dial, if there are any. receives: whether this server asks others
    for caches as well.
    """

    def __init__(
        self,
        facts: ServerFacts,
        limits: SchedulerLimits,
        links: list[str] | None = None,
        *,
        receives: bool = False,
        seed: int = 0,
    ) -> None:
        self._facts = facts
        self._limits = limits
        self._outbox = Outbox()
        self._worker_health = WorkerHealth.of(facts, limits.pace)
        self.account = account_of(facts, limits)
        self.request_token_max = min(facts.sequence_token_max, self.account.token_capacity)
        batch_limits = limits.of_batch(facts, self.request_token_max + 1, is_prompt_only=True)
        self.batcher = Batcher(self.account, batch_limits)
        self._flushes = Flushes(self.account, self.batcher, self._outbox)
        self._pauses = Pauses(self.batcher, self._outbox)
        self._credits = Credits(limits.queue_max)
        token_max = self.request_token_max
        self.transfers = Transfers(
            Introduction(facts, "prefill", True, receives, token_max, needs_inbound=False),
            limits.pace,
            self.account,
            self._outbox,
            random.Random(seed),
            token_max=token_max,
            addresses=links or (),
            credits=self._credits,
        )
        outgoing = self.transfers.outgoing
        self.requests = Requests(self.account, self.batcher, outgoing, self._credits, self._outbox)
        self.meetings = Meetings(
            self.requests,
            outgoing,
            self._credits,
            self._outbox,
            request_token_max=token_max,
            queue_max=limits.queue_max,
            room_timeout_s=limits.bootstrap_timeout_s,
        )
        self._told_prefixes = ToldPrefixes(self.account.cache, self.account.host)
        rng, queue = random.Random(seed + 1), self.requests.queue
        self.returns = Returns(self.account, self.transfers, queue, rng, is_on=receives)
        self.tier = HostTier(self.account, queue, self._outbox, facts.rank_count)
        self._admission = Admission(
            self.account, self.batcher, self.requests, self.returns, self.tier
        )
        self._transfer_trouble = ""
        self._stale_count = 0

    @property
    def is_idle(self) -> bool:
        return not self.requests

    # ---- the three calls -------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in; the effects are to be carried out in order."""
        match event:
            case FromFrontend(message=message):
                self._handle_frontend(message, now)
            case FromWorker(message=report):
                self._handle_worker(report, now)
            case FromPeer():
                self._apply_events(self.transfers.handle_peer(event, now), now)
            case WorkersStopped(ranks=ranks):
                self._worker_health.stopped_ranks = ranks
            case DrainEnded():
                self._cut_off(now)
            case Stopping():
                peer_count = self.transfers.links.leave()
                self._outbox.report_end(len(self.requests), peer_count, self.requests.counters)
            case Tick() | FrontendBehind():
                pass  # a request has one token here, and a frontend that lags asks for no more
            case _:
                self._apply_events(self.transfers.handle_link(event, now), now)
        return self._outbox.take()

    def schedule(self, now: float) -> list[Effect]:
        """Look at the time, admit what fits, and send the steps that may be in flight."""
        self._flushes.answer(len(self.requests))
        self._pauses.review()
        self._expire(now)
        if not self._pauses.is_on:
            if not self.transfers.writers.trouble:
                self._admit(now)
            self.returns.review(now, is_short=self._admission.is_short)
            self._send_steps()
        self.tier.save_ahead()
        links, is_busy = self.transfers.links, self.batcher.is_computing
        condition = Condition(
            self._worker_health.progress,
            is_busy,
            self._worker_health.check(now, is_busy=is_busy),
            self.meetings.is_draining,
            queued_token_count=self._admission.queued_token_count,
            cached_prefixes=self._told_prefixes.take(now),
        )
        targets = [target.incarnation for target in links.connections.targets()]
        # In a pause there is room for nothing: decode servers keep what they have, or ask others.
        request_count = self._limits.queue_max if self._pauses.is_on else len(self.requests)
        links.hurry(self._credits.update(targets, request_count))
        self.transfers.send_due(now, condition)
        self._check_transfers(targets, now)
        return self._outbox.take()

    def next_wakeup(self, now: float) -> float:
        """When `schedule` wants to be called even if nothing happens."""
        times = [self.requests.deadlines.next_at]
        if not self._pauses.is_on:
            times.append(self.meetings.rendezvous.next_at)
        return min(
            [now + self._limits.pace.interval_s, *(time for time in times if time is not None)]
        )

    def _admit(self, now: float) -> None:
        for decision in self._admission.decide(now):
            match decision:
                case Schedule(request=request, match=match):
                    self.requests.schedule(request, match, now)
                case GiveUpHeld(request=request):
                    self.meetings.fail(request, failure_of_expired(request), now)
                case _:
                    assert_never(decision)

    def _send_steps(self) -> None:
        while True:
            planned = self.batcher.plan_step()
            assert not planned.retracted, "a prompt's pages are all there before it is computed"
            if planned.step is None:
                return
            self._outbox.to_workers(planned.step)
            for chunk in planned.step.chunks:
                request = self.requests.get(chunk.request_id)
                assert request is not None and request.sequence is not None
                is_part = bool(chunk.state_pages)  # the next chunk's send has its pages as well
                if request.transfer is not None and not is_part:
                    pages, stop = request.sequence.page_lists(), chunk.stop
                    self.transfers.outgoing.send(
                        request.transfer,
                        pages,
                        stop,
                        planned.step.step_id,
                        is_final=chunk.is_last,
                    )

    def _check_transfers(self, targets: list[str], now: float) -> None:
        """Peers are not told: each knows its own, and a peer that gave this server up could not try
        it."""
        before = self._transfer_trouble
        self._transfer_trouble = self.transfers.outgoing.health.describe(targets, now)
        if bool(before) != bool(self._transfer_trouble):
            text = self._transfer_trouble or "transfers are not known to fail any more"
            self._outbox.report(text, is_warning=bool(self._transfer_trouble))

    def _expire(self, now: float) -> None:
        for request in self.requests.take_expired(now):
            failure = Failure(FailureKind.TIMED_OUT, "the request's time budget is used up")
            is_held = request.state is PrefillState.HELD
            self.meetings.fail(request, failure_of_expired(request) if is_held else failure, now)
        if not self._pauses.is_on:
            self.meetings.expire(now)
        self._apply_events(self.transfers.expire(now), now)

    # ---- frontend --------------------------------------------------------------------------------

    def _handle_frontend(self, message: Command, now: float) -> None:
        match message:
            case Submit():
                self.meetings.handle_submit(message, now)
            case Cancel():
                request = self.requests.of_client(message.request_id)
                if request is not None:
                    failure = Failure(FailureKind.ABORTED, message.reason)
                    if not self.requests.drop_client(request, message.request_id, failure, now):
                        self.meetings.fail(request, failure, now)
            case Drain():
                self.meetings.is_draining = True
                self.transfers.links.hurry()
            case FlushCache():
                self._flushes.handle(message, len(self.requests))
            case Pause():
                self._pauses.begin(message, now)
            case Continue():
                self.meetings.rendezvous.postpone(self._pauses.end(message, now))
            case GetState():
                self._outbox.to_frontend(self._state(message.call_id))
            case SetPeers():
                pass  # a prefill server dials nobody
            case _:
                assert_never(message)

    # ---- transfers -------------------------------------------------------------------------------

    def _apply_events(self, events: list[TransferEvent], now: float) -> None:
        for event in events:
            match event:
                case CacheAsked(transfer=transfer):
                    self.meetings.handle_asked(transfer, now)
                case AskRefused(room=room, failure=failure):
                    self.meetings.note_refused(room, failure, now)
                case SendProgressed(transfer=transfer):
                    request = self.requests.get(transfer.owner)
                    if request is not None:
                        self._handle_progress(request, now)
                case AbortAsked():
                    self._handle_abort(event, now)
                case RoomWithdrawn(room=room, reason=reason):
                    text = f"the decode server gave up before it had pages: {reason}"
                    self.meetings.withdraw_room(room, text, now)
                case TargetLost():
                    self._handle_lost(event, now)
                case CacheOffered():
                    is_short = self._admission.is_short or bool(self.transfers.writers.trouble)
                    self.returns.handle_offer(event, now, is_short=is_short)
                case CacheReady():
                    self.returns.handle_ready(event)
                case CacheFailed():
                    self.returns.handle_failed(event)
                case _:
                    assert_never(event)

    def _handle_progress(self, request: PrefillRequest, now: float) -> None:
        """Puts or digests have come back, or the last chunk is computed."""
        transfer = request.transfer
        assert transfer is not None
        if request.state is PrefillState.DRAINING:
            self.requests.settle(request, now)
        elif transfer.failure is not None:
            self.meetings.fail(request, transfer.failure, now)
        elif request.state is PrefillState.SENDING and not transfer.is_on_its_way:
            self.requests.finish(request, now)

    def _handle_abort(self, event: AbortAsked, now: float) -> None:
        """The decode server gave up. A client that waits here did not: a router would take its
        "aborted" for an answer."""
        text = f"the decode server gave up: {event.reason}"
        failure = Failure(FailureKind.OTHER_HALF_ABORTED, text)
        request = self.requests.get(event.transfer.owner)
        if request is None:
            self.meetings.drop(event.transfer, failure, now)
            return
        if not request.clients:
            failure = Failure(FailureKind.ABORTED, text)
        self.meetings.fail(request, failure, now)

    def _cut_off(self, now: float) -> None:
        """Whatever is left fails, and ends once nothing is sent any more."""
        text = "the prefill server takes on another role, or other weights"
        failure = Failure(FailureKind.STOPPING, text, is_retryable=True)
        for request in list(self.requests):
            self.meetings.fail(request, failure, now)
        for transfer in list(self.transfers.outgoing):
            if self.requests.get(transfer.owner) is None:
                self.meetings.drop(transfer, failure, now)

    def _handle_lost(self, event: TargetLost, now: float) -> None:
        text = f"decode server {event.incarnation} was lost: {event.reason}"
        failure = Failure(FailureKind.PEER_LOST, text)
        for transfer in event.transfers:
            request = self.requests.get(transfer.owner)
            if request is not None:
                self.meetings.fail(request, failure, now)
            elif self.transfers.outgoing.get(transfer.transfer_id) is transfer:
                self.meetings.drop(transfer, failure, now)

    # ---- workers ---------------------------------------------------------------------------------

    def _handle_worker(self, message: WorkerReport, now: float) -> None:
        match message:
            case StepDone():
                self._handle_step(message, now)
            case WorkerBeat():
                self._worker_health.apply_beat(message.rank, message.progress)
            case PagesMoved():
                self.tier.note_moved(message)
            case WorkerReady():
                self._stale_count += 1
            case _:
                self._apply_events(self.transfers.handle_worker(message, now), now)

    def _handle_step(self, done: StepDone, now: float) -> None:
        outcome = self.batcher.apply_done(done)
        for chunk in outcome.chunks:
            self.requests.note_chunk(chunk, now)
        for undrawn in outcome.failed:
            failed = self.requests.get(undrawn.sequence.request_id)
            assert failed is not None
            self.meetings.fail(failed, undrawn.failure, now)
        for token in outcome.tokens:
            self._handle_computed(token.sequence, token.token_ids, token.logprobs, now)
        for drawn in outcome.samples:
            self.batcher.retire(drawn.tokens)
            told = [drawn.logprobs[one] for one in drawn.tokens if one in drawn.logprobs]
            self._handle_computed(drawn.sequence, list(drawn.tokens.values()), told, now)
        for request in self.requests:
            if request.state is PrefillState.DRAINING:
                self.requests.settle(request, now)

    def _handle_computed(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs], now: float
    ) -> None:
        request = self.requests.note_computed(sequence, tokens, logprobs, now)
        if request.is_ahead:
            # Its decode server may have asked already, before it heard of the cache.
            self.meetings.offer(request, now)
        else:
            self._handle_progress(request, now)

    # ---- what others may know --------------------------------------------------------------------

    def _state(self, call_id: int) -> State:
        requests, transfers, rendezvous = self.requests, self.transfers, self.meetings.rendezvous
        refusals = transfers.links.refusals
        return State(
            call_id=call_id,
            is_ready=True,
            queues={
                "bootstrap": rendezvous.request_count,
                "waiting": len(requests.queue),
                "running": self.batcher.prompt_count,
                "inflight": transfers.outgoing.open_count,
                "held": requests.held_count,
                "reservations": rendezvous.reservation_count,
                "returning": len(self.returns),
            },
            counters={
                **requests.counters,
                **self.returns.counters,
                **self.tier.counters,
                "requests": float(self.meetings.count),
                **self.account.prefix_counters(),
                "waited_for_equal": float(self._admission.followed_count),
                "stale_messages": float(self._stale_count + transfers.stale_count),
                "peers_lost": float(transfers.links.connections.lost_count),
                "refused_peers": float(refusals.count),
                "refused_links": float(refusals.link_count),
            },
            page_groups=self.account.states(self._facts.layout),
            peers=transfers.states(),
            prefix_cache=self.account.prefix_state(self._told_prefixes.count),
            step_count=self.batcher.step_count,
            workers=list(self._facts.workers),
            is_paused=self._pauses.is_on,
            trouble=self._worker_health.trouble
            or self._transfer_trouble
            or self.transfers.writers.trouble,
        )

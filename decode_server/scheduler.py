"""Every decision of the decode server: admission, transfers, decoding, retraction. A pure core.

Events in, effects out, time passed in. It is the only writer of request, page and peer state here.
Knows nothing of sockets, processes or tensors.
"""

from __future__ import annotations

import random
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
    Attached,
    Detached,
    Heartbeat,
    PeerMessage,
    Quiesced,
    Refuse,
    TransferDone,
    TransferFailed,
    Welcome,
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
from common.scheduling.batcher import Batcher
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
from common.scheduling.sequence import PageAccount, Sequence
from common.scheduling.transitions import DecodeEvent
from common.scheduling.worker_health import WorkerHealth
from decode_server.admission import Admission
from decode_server.arrivals import Arrivals
from decode_server.choice import Choice
from decode_server.endings import Endings
from decode_server.output_lengths import OutputLengths
from decode_server.prefill_peers import PrefillPeers
from decode_server.prompt_limits import PromptLimits
from decode_server.receiver import Receiver
from decode_server.recovery import Recovery
from decode_server.request import DecodeRequest
from decode_server.self_test import SelfTests
from decode_server.starvation import Starvation
from decode_server.verifier import Verifier


class DecodeScheduler:
    """The decode server's core. Call `handle` for every event and `schedule` after each.

    links: addresses of prefill servers to dial. is_local: compute prompts here and dial nobody.
    may_fall_back: compute a prompt here if no prefill server can be found for it.
    """

    def __init__(
        self,
        facts: ServerFacts,
        limits: SchedulerLimits,
        links: list[str],
        *,
        is_local: bool = False,
        may_fall_back: bool = False,
        seed: int = 0,
    ) -> None:
        self._facts = facts
        self._limits = limits
        self._is_local = is_local
        self._may_fall_back = may_fall_back
        self._outbox = Outbox()
        self._peers = PrefillPeers(facts, limits.pace, links, self._outbox, random.Random(seed + 1))
        self._worker_health = WorkerHealth.of(facts, limits.pace)
        self.account = PageAccount(
            facts.layout.groups,
            facts.page_counts,
            has_prefix_cache=is_local and limits.has_prefix_cache,
            chunk_token_max=limits.chunk_token_max,
        )
        self.request_token_max = min(facts.sequence_token_max, self.account.token_capacity)
        self._batcher = Batcher(self.account, limits.of_batch(facts, self.request_token_max))
        self._flushes = Flushes(self.account, self._batcher, self._outbox)
        self._receiver = Receiver(facts, self.account, self._outbox)
        self._verifier = Verifier(facts, self._receiver, self._outbox)
        lengths = OutputLengths()
        self._endings = Endings(
            facts.incarnation,
            self.account,
            self._batcher,
            self._receiver,
            self._peers,
            lengths,
            self._outbox,
        )
        self._recovery = Recovery(
            self._peers,
            self._receiver,
            self._endings,
            is_local=is_local,
            may_fall_back=may_fall_back,
        )
        self._prompt_limits = PromptLimits(self._peers, self._endings, may_fall_back=may_fall_back)
        self._arrivals = Arrivals(
            facts.incarnation,
            self._batcher,
            self._receiver,
            self._verifier,
            self._peers,
            self._endings,
            self._recovery,
        )
        self._self_tests = SelfTests(self._peers, self._endings, limits.self_test_interval_s)
        self._admission = Admission(
            facts.incarnation,
            self.account,
            self._batcher,
            Choice(self._peers, self._receiver, random.Random(seed + 2)),
            self._receiver,
            lengths,
            self._outbox,
            seed=seed,
        )
        self._starvation = Starvation(self._admission, self._outbox)
        self._is_frontend_behind = False
        self._counters = dict.fromkeys(("requests", "stale_messages", "computed_here"), 0.0)

    @property
    def is_idle(self) -> bool:
        return not self._endings.client_count

    @property
    def is_ready(self) -> bool:
        can_transfer = any(map(self._self_tests.has_passed, self._peers.connected()))
        return self._is_local or self._may_fall_back or can_transfer

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
            case WorkersStopped(ranks=ranks):
                self._worker_health.stopped_ranks = ranks
            case ProcessesGone(incarnation=incarnation):
                self._recovery.lose(
                    self._peers.lose_incarnation(incarnation, "its processes ended"), now
                )
                if self._peers.note_gone(incarnation):
                    self._receiver.apply_gone(incarnation)
            case LinkDropped(link=link, reason=reason):
                self._recovery.lose(self._peers.handle_link_dropped(link, reason, now), now)
            case LinkRefused(link=link, reason=reason):
                self._peers.handle_link_refused(link, reason, now)
            case LinkBroke(link=link, is_refused=is_refused):
                is_asked = self._receiver.is_asked
                lost = self._peers.handle_break(link, is_refused=is_refused, is_asked=is_asked)
                self._recovery.lose(lost, now)
            case Stopping():
                self._leave()
            case FrontendBehind(is_behind=is_behind):
                self._is_frontend_behind = is_behind
            case Tick() | UnreadableRequest():
                pass  # nobody reserves pages here
            case _:
                assert_never(event)
        return self._outbox.take()

    def schedule(self, now: float) -> list[Effect]:
        """Look at the time, admit what fits, and send the steps that may be in flight."""
        self._flushes.look(self._endings.client_count)
        self._recovery.expire(now)
        self._prompt_limits.look(now)
        self._self_tests.look(now, may_begin=self._starvation.since is None)
        self._receiver.repeat_aborts(now)
        # Nobody looks further along the queue than somebody may be admitted.
        waiting = self._endings.queue
        here = (request for request in waiting if self._is_local or request.is_computed_here)
        admitted = self._admission.admit_here(here, now)
        if not self._is_local:
            elsewhere = (request for request in waiting if not request.is_computed_here)
            admitted += self._admission.admit_remote(elsewhere, now)
        for request in admitted:
            waiting.discard(request.request_id)
        self._starvation.look(waiting, now)
        self._send_steps(now)
        is_busy = self._batcher.is_computing
        trouble = self._worker_health.look(now, is_busy=is_busy)
        running_count = self._batcher.running_count
        progress = self._worker_health.progress
        condition = Condition(progress, is_busy, trouble, running_count=running_count)
        self._peers.send_due(now, condition)
        return self._outbox.take()

    def _send_steps(self, now: float) -> None:
        while not self._is_frontend_behind:
            planned = self._batcher.plan_step()
            for sequence in planned.retracted:
                self._retract(sequence, now)
            if planned.step is None:
                return
            self._outbox.to_workers(planned.step)

    def next_wakeup(self, now: float) -> float:
        """When `schedule` wants to be called even if nothing happens."""
        deadline = self._endings.deadlines.next_at
        latest = now + self._limits.pace.interval_s
        return latest if deadline is None else min(deadline, latest)

    # ---- frontend --------------------------------------------------------------------------------

    def _handle_frontend(self, message: FrontendToScheduler, now: float) -> None:
        match message:
            case Submit():
                self._handle_submit(message, now)
            case Cancel():
                request = self._endings.requests.get(message.request_id)
                if request is not None:
                    self._endings.fail(request, "aborted", message.reason, 499, now)
            case Drain():
                pass  # the frontend lets nobody in, and nobody else brings work
            case FlushCache():
                self._flushes.handle(message, self._endings.client_count)
            case GetState():
                self._outbox.to_frontend(self._state(message.call_id, now))
            case _:
                assert_never(message)

    def _handle_submit(self, submit: Submit, now: float) -> None:
        self._counters["requests"] += 1
        token_count = len(submit.token_ids)
        waiting_count = len(self._endings.queue)
        if not 1 <= token_count < self.request_token_max:
            limit = f"must be 1..{self.request_token_max - 1}"
            self._refuse(submit, 400, "bad_request", f"prompt of {token_count} tokens: {limit}")
        elif waiting_count >= self._limits.queue_max:
            text = f"queue full: {waiting_count} requests are waiting"
            self._refuse(submit, 503, "queue_full", text)
        elif submit.bootstrap is not None and not submit.bootstrap.engine and self._is_local:
            text = "bootstrap_room: this server was started with --prefill none"
            self._refuse(submit, 400, "bad_request", text)
        else:
            request = DecodeRequest(
                request_id=submit.request_id,
                token_ids=list(submit.token_ids),
                prompt_count=token_count,
                sampling=submit.sampling,
                bootstrap=submit.bootstrap,
                arrived_at=now,
                deadline=now + submit.budget_s,
                waiting_since=now,
                origin=submit.origin,
            )
            self._endings.requests[request.request_id] = request
            self._endings.queue.add(request)
            self._endings.deadlines.add(request.request_id, request.deadline)
            self._prompt_limits.check(request, now)

    def _refuse(self, submit: Submit, status: int, kind: str, message: str) -> None:
        self._outbox.to_frontend(Failed(submit.request_id, status, kind, message))

    # ---- peers -----------------------------------------------------------------------------------

    def _handle_peer(self, link: str, message: PeerMessage, now: float) -> None:
        match message:
            case TransferDone():
                self._arrivals.handle_done(link, message, now)
            case TransferFailed():
                self._arrivals.handle_failed(link, message, now)
            case Quiesced():
                self._arrivals.handle_quiet(link, message)
            case Heartbeat():
                self._peers.handle_heartbeat(link, message)
            case Welcome():
                self._peers.handle_welcome(link, message, now)
            case Refuse():
                self._recovery.lose(self._peers.handle_refuse(link, message, now), now)
            case Attached():
                self._recovery.lose(self._peers.handle_attached(link, message, now), now)
            case Detached():
                self._recovery.lose(self._peers.handle_detached(link, message), now)
            case _:
                self._counters["stale_messages"] += 1

    # ---- workers ---------------------------------------------------------------------------------

    def _handle_worker(self, message: WorkerToScheduler, now: float) -> None:
        match message:
            case StepDone():
                self._handle_step(message, now)
            case WorkerBeat():
                self._worker_health.apply_beat(message.rank, message.progress)
            case PeerOpened():
                self._peers.handle_opened(message)
            case PeerFailed():
                incarnation = self._peers.lose_incarnation(message.peer, message.reason)
                self._recovery.lose(incarnation, now)
            case PeerClosed():
                if self._peers.handle_closed(message.peer, message.rank):
                    self._receiver.apply_closed(message.peer)
                    if self._peers.is_fenced(message.peer):
                        self._receiver.apply_gone(message.peer)
            case Forgotten():
                self._receiver.apply_forgotten(message)
            case Digested():
                verified = self._verifier.apply_digested(message)
                if verified is not None:
                    self._handle_peer(*verified, now)
            case PeerConnected() | SendSettled() | WorkerReady():
                self._counters["stale_messages"] += 1
            case _:
                assert_never(message)

    def _handle_step(self, done: StepDone, now: float) -> None:
        outcome = self._batcher.apply_done(done)
        for chunk in outcome.chunks:
            request = self._endings.requests[chunk.sequence.request_id]
            is_first_time = request.first_token_at == 0.0
            if is_first_time and chunk.prompt_logprobs:
                request.prompt_logprobs.append(chunk.prompt_logprobs)
            if chunk.is_last and is_first_time:
                request.note_computed_here(chunk.sequence, now)
                self._counters["computed_here"] += not self._is_local
        for undrawn in outcome.failed:
            failing = self._endings.requests[undrawn.sequence.request_id]
            self._endings.fail(failing, undrawn.kind, undrawn.reason, undrawn.status, now)
        for token in outcome.tokens:
            decoding = self._endings.requests[token.sequence.request_id]
            self._endings.tell_token(decoding, token.token_id, token.logprobs, token.finish, now)

    def _retract(self, sequence: Sequence, now: float) -> None:
        request = self._endings.requests[sequence.request_id]
        self._endings.wait_again(request, DecodeEvent.RETRACTED, now)

    def _leave(self) -> None:
        peer_count = self._peers.leave()
        self._outbox.report_end(len(self._endings.requests), peer_count, self._endings.counters)

    # ---- what others may know --------------------------------------------------------------------

    def _state(self, call_id: int, now: float) -> State:
        peers = self._peers.states(self._receiver.counts_by_link())
        return State(
            call_id=call_id,
            is_ready=self.is_ready,
            queues={
                "waiting": len(self._endings.queue),
                "prealloc": self._admission.short_count(self._endings.queue, now),
                "transfer": self._receiver.under_way_count,
                "retracted": sum(r.output_count > 0 for r in self._endings.queue),
                "ready": self._batcher.ready_count,
                "running": self._batcher.running_count + self._batcher.prompt_count,
                "draining": self._receiver.abandoned_count,
            },
            counters={
                **self._counters,
                **self._starvation.counters,
                **self._endings.counters,
                **self._verifier.counters,
                **self._self_tests.counters,
                "stale_messages": self._counters["stale_messages"] + self._arrivals.stale_count,
                "peers_lost": float(self._peers.lost_count),
            },
            page_groups=self.account.states(self._facts.layout),
            peers=peers,
            step_count=self._batcher.step_count,
            workers=list(self._facts.workers),
            trouble=self._worker_health.trouble or self._starvation.trouble,
        )

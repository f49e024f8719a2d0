"""Every decision of the decode server: admission, transfers, decoding, retraction. A pure core.

Events in, effects out, time passed in. Policies decide, `requests` and `transfers` write. Knows
nothing of sockets, processes or tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
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
from common.protocol.peer import TransferDone
from common.protocol.worker import PagesMoved, StepDone, WorkerBeat, WorkerReady, WorkerReport
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
from common.scheduling.host_tier import HostTier
from common.scheduling.page_account import account_of
from common.scheduling.peers import Condition, Outbox
from common.scheduling.rates import StepRates
from common.scheduling.transitions import DecodeState
from common.scheduling.worker_health import WorkerHealth
from common.transfers.incoming_transfer import CacheFailed, CacheReady
from common.transfers.introduction import Introduction
from common.transfers.outgoing import CacheAsked
from common.transfers.transfers import (
    AbortAsked,
    SendProgressed,
    TargetLost,
    TransferEvent,
    Transfers,
)
from decode_server.admission import Admission
from decode_server.choice import Choice
from decode_server.decisions import ComputeHere, Fail, KeepHere, Reserve, Retry, Split, Unbind
from decode_server.entrance import Entrance
from decode_server.expected_time import ExpectedTime
from decode_server.interruptions import Interruptions
from decode_server.missing_servers import MissingServers
from decode_server.recovery import decide_after, failure_of_late, loses_binding
from decode_server.request import DecodeRequest
from decode_server.requests import Requests
from decode_server.returns import Returns
from decode_server.self_test import SelfTests
from decode_server.starvation import Starvation

COUNTED = ("requests", "stale_messages", "computed_here", "local_prefills")
Decision = Reserve | ComputeHere | Split | KeepHere | Unbind | Fail | Retry


class DecodeScheduler:
    """The decode server's core. Call `handle` for every event and `schedule` after each.

    links: addresses of prefill servers to dial at once. is_local: compute all prompts here.
    may_fall_back: compute a prompt here if no prefill server can be found for it.
    computes_rests: compute the rest of a prompt here whose beginning is, where that is quicker.
    sends: whether other servers may ask this one for caches as well.
    """

    def __init__(
        self,
        facts: ServerFacts,
        limits: SchedulerLimits,
        links: list[str],
        *,
        is_local: bool = False,
        may_fall_back: bool = False,
        computes_rests: bool = False,
        sends: bool = False,
        seed: int = 0,
    ) -> None:
        self._facts = facts
        self._limits = limits
        self._is_local = is_local
        self._may_fall_back = may_fall_back
        self._outbox = Outbox()
        self._worker_health = WorkerHealth.of(facts, limits.pace)
        self.account = account_of(facts, limits, shares_samples=True)
        self.request_token_max = min(facts.sequence_token_max, self.account.token_capacity)
        batch_limits = limits.of_batch(facts, self.request_token_max)
        self.batcher = Batcher(self.account, batch_limits, StepRates(facts.pass_times))
        self.transfers = Transfers(
            Introduction(facts, "decode", sends=sends, receives=True, needs_outbound=False),
            limits.pace,
            self.account,
            self._outbox,
            random.Random(seed + 1),
            token_max=self.request_token_max,
            addresses=links,
        )
        self.requests = Requests(
            facts.incarnation, self.account, self.batcher, self.transfers, self._outbox,
            random.Random(seed),
        )  # fmt: skip
        self._interruptions = Interruptions(self.account, self.batcher, self._outbox, self.requests)
        self._times = ExpectedTime(self.batcher, facts.digest_tokens)
        choice = Choice(self.transfers, self._times, random.Random(seed + 2))
        rng = random.Random(seed + 3)
        self.returns = Returns(
            facts, self.account, self.transfers, self._outbox, choice, rng, is_on=sends
        )
        self.tier = HostTier(self.account, self.requests.queue, self._outbox, facts.rank_count)
        self._admission = Admission(
            self.account,
            self.batcher,
            choice,
            self.requests,
            self.transfers,
            self._times,
            self.tier,
            is_local=is_local,
            computes_rests=computes_rests and not is_local,
        )
        self._computes_rests = computes_rests and not is_local
        self._missing_servers = MissingServers(
            self.transfers, self.requests, is_local=is_local, may_fall_back=may_fall_back
        )
        self._entrance = Entrance(
            self.requests, limits.queue_max, self.request_token_max, is_local=is_local
        )
        self._self_tests = SelfTests(self.transfers.links, limits.self_test_interval_s)
        self._starvation = Starvation(self._admission, self._outbox)
        self._is_frontend_behind = False
        self._counters = dict.fromkeys(COUNTED, 0.0)

    @property
    def is_idle(self) -> bool:
        return not self.requests.client_count

    @property
    def is_ready(self) -> bool:
        sources = self.transfers.links.connections.sources()
        can_transfer = any(map(self._self_tests.has_passed, sources))
        return self._is_local or self._may_fall_back or can_transfer

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
            case Stopping():
                peer_count = self.transfers.links.leave()
                self._outbox.report_end(len(self.requests), peer_count, self.requests.counters)
            case FrontendBehind(is_behind=is_behind):
                self._is_frontend_behind = is_behind
            case DrainEnded():
                self._interruptions.cut_off(now)
            case Tick():
                pass
            case _:
                self._apply_events(self.transfers.handle_link(event, now), now)
        return self._outbox.take()

    def schedule(self, now: float) -> list[Effect]:
        """Look at the time, admit what fits, and send the steps that may be in flight."""
        self._interruptions.review()
        self._expire(now)
        self.returns.offer(self.requests.take_ended(), now)
        is_paused = self._interruptions.is_paused
        if not is_paused:
            self._begin_requests(now)
            self._send_steps(now)
        self.requests.drain_rate.note(0 if is_paused else len(self.requests.queue), now)
        self.tier.save_ahead()
        is_busy = self.batcher.is_computing
        trouble = self._worker_health.check(now, is_busy=is_busy)
        running_count = self.batcher.running_count
        progress = self._worker_health.progress
        condition = Condition(progress, is_busy, trouble, running_count=running_count)
        self.transfers.send_due(now, condition)
        return self._outbox.take()

    def _begin_requests(self, now: float) -> None:
        """Those that wait, as far as there are pages and servers for them."""
        self._apply_decisions(self._missing_servers.review(now), now)
        if self._starvation.since is None:
            for link, budget_s in self._self_tests.begin_due(now):
                self.requests.submit_test(link, budget_s, now)
        self._apply_decisions(self._admission.decide(now), now)
        self._starvation.update(self.requests.queue.first, now)

    def next_wakeup(self, now: float) -> float:
        """When `schedule` wants to be called even if nothing happens."""
        deadline = self.requests.deadlines.next_at
        latest = now + self._limits.pace.interval_s
        return latest if deadline is None else min(deadline, latest)

    def _expire(self, now: float) -> None:
        """End requests that have run out of time. Give up peers that can't go on, let others go."""
        for request in self.requests.take_expired(now):
            failure = failure_of_late(request, len(self.requests.queue) - 1)
            self._fail(request, failure, now)
        self._apply_events(self.transfers.expire(now), now)
        self._apply_events(self.transfers.part(self._missing_servers.named_links, now), now)

    def _send_steps(self, now: float) -> None:
        if self._computes_rests:
            # Whole prompts, which no prefill server can be found for, are no short rests.
            prompts = map(self.requests.of_sequence, self.batcher.prompts)
            is_whole = any(request.is_computed_here for request in prompts)
            tokens = None if is_whole else self._times.step_tokens()
            self.batcher.shared_step_tokens = tokens
        while not self._is_frontend_behind:
            planned = self.batcher.plan_step()
            for sequence in planned.retracted:
                self.requests.retract(self.requests.of_sequence(sequence), now)
            if planned.step is None:
                return
            self._outbox.to_workers(planned.step)

    # ---- decisions -------------------------------------------------------------------------------

    def _apply_decisions(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            self._apply(decision, now)

    def _apply(self, decision: Decision, now: float) -> None:
        request = decision.request
        match decision:
            case Reserve(source=source, match=match):
                self.requests.reserve(request, source, match, now)
            case ComputeHere(match=match, is_rest=is_rest):
                self.requests.compute_here(request, match, now)
                self._counters["local_prefills"] += is_rest
            case Split():
                self.requests.split(request)
            case KeepHere():
                self.requests.keep_here(request)
            case Unbind():
                self.requests.unbind(request)
            case Fail(failure=failure):
                self._fail(request, failure, now)
            case Retry(is_attempt=is_attempt, is_computed_here=is_here):
                self.requests.retry(request, now, is_attempt=is_attempt, is_computed_here=is_here)
            case _:
                assert_never(decision)

    def _fail(self, request: DecodeRequest, failure: Failure, now: float) -> None:
        """A self-test that found no room here says nothing of the other side."""
        is_tried = request.state is DecodeState.TRANSFERRING or request.failure_count > 0
        self.requests.fail(request, failure, now)
        if request.tested_link:
            problem = f"self-test: {failure.message}" if is_tried else ""
            self._self_tests.note_end(request.tested_link, problem, now)

    # ---- frontend --------------------------------------------------------------------------------

    def _handle_frontend(self, message: Command, now: float) -> None:
        match message:
            case Submit():
                self._handle_submit(message, now)
            case Cancel(reason=reason, is_moved=is_moved):
                request = self.requests.get(message.request_id)
                if request is not None:
                    kind = FailureKind.MOVED if is_moved else FailureKind.ABORTED
                    self.requests.fail(request, Failure(kind, reason), now, is_moved=is_moved)
            case Drain():
                pass  # the frontend lets no request in, and nothing else brings work
            case FlushCache() | Pause() | Continue():
                self._interruptions.handle(message, now)
            case SetPeers():
                self.transfers.links.addresses.want(message.peers)
            case GetState():
                self._outbox.to_frontend(self._state(message.call_id, now))
            case _:
                assert_never(message)

    def _handle_submit(self, submit: Submit, now: float) -> None:
        self._counters["requests"] += 1 + len(submit.siblings)
        taken = self._entrance.check(submit, now)
        if isinstance(taken, Failure):
            self.requests.refuse(submit, taken)
            return
        if taken is not None:
            self._apply(taken, now)
        for request in self.requests.submit(submit, now):
            decision = self._missing_servers.check_length(request, now)
            if decision is not None:
                self._apply(decision, now)

    # ---- transfers -------------------------------------------------------------------------------

    def _apply_events(self, events: list[TransferEvent], now: float) -> None:
        for event in events:
            match event:
                case CacheReady():
                    self._handle_ready(event, now)
                case CacheFailed():
                    self._handle_failed(event, now)
                case CacheAsked() | SendProgressed() | AbortAsked() | TargetLost():
                    self.returns.apply(event, now)
                case _:  # rooms and offers are of prefill servers
                    self._counters["stale_messages"] += 1

    def _handle_ready(self, ready: CacheReady, now: float) -> None:
        request = self.requests.get(ready.owner)
        assert request is not None
        links, done = self.transfers.links, ready.done
        source = links.connections.of_incarnation(ready.transfer.peer)
        if source is not None:
            links.note_success(source, now)
        text = self._why_unfit(request, done.first_tokens or [done.first_token])
        if text:
            self.transfers.incoming.release(ready.transfer)
            failure = Failure(FailureKind.UNFIT_TOKEN, text, is_retryable=True)
            self._handle_failed(CacheFailed(ready.transfer, ready.owner, failure), now)
            return
        self._times.note_ready(ready, request.asked_at, now)
        finish = self.requests.adopt(request, ready, now)
        if request.children:
            self._fork_ready(request, done, now)
            return
        self.requests.send_tokens(request, [done.first_token], done.logprobs[:1], finish, now)
        if finish is not None and request.tested_link:
            self._self_tests.note_end(request.tested_link, "", now)

    def _why_unfit(self, request: DecodeRequest, first_tokens: list[int]) -> str:
        """Why the output can't begin so, "" if it can: the prefill server was told less than this
        server, or does not know a rule that is newer than itself."""
        ends_too_early, sampling = self.batcher.limits.ends_too_early, request.sampling
        if request.is_held and any(ends_too_early(sampling, one) for one in first_tokens):
            return "the first token of the held cache would end the output too early"
        if any(map(sampling.forbids_first, first_tokens)):
            return (
                "the prefill server drew a first token that allowed_token_ids or bad_words forbid"
            )
        return ""

    def _fork_ready(self, parent: DecodeRequest, done: TransferDone, now: float) -> None:
        """A prompt's cache is there, and the first tokens of its samples in the order of its seeds;
        fewer than that from a server whose client asked for fewer."""
        first_tokens = done.first_tokens or [done.first_token]
        places = {child: parent.seeds.index(child.sampling.seed) for child in parent.children}
        drawn = {c.request_id: place for c, place in places.items() if place < len(first_tokens)}
        tokens = {request_id: first_tokens[place] for request_id, place in drawn.items()}
        told = {r: done.logprobs[p] for r, p in drawn.items() if p < len(done.logprobs)}
        self.requests.fork(parent, tokens, told, now, is_known=False)

    def _handle_failed(self, failed: CacheFailed, now: float) -> None:
        request = self.requests.get(failed.owner)
        assert request is not None
        links, kind = self.transfers.links, failed.failure.kind
        source = links.connections.of_incarnation(failed.transfer.peer)
        if source is not None and kind.is_peers_fault:
            links.note_failure(source, now)
        if source is not None and kind is FailureKind.QUEUE_FULL and failed.failure.is_retryable:
            links.note_full(source)
        decision = decide_after(request, failed, may_fall_back=self._may_fall_back)
        if loses_binding(request, failed):
            self.requests.unbind(request)
        self._apply(decision, now)

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
                self._counters["stale_messages"] += 1
            case _:
                self._apply_events(self.transfers.handle_worker(message, now), now)

    def _handle_step(self, done: StepDone, now: float) -> None:
        outcome = self.batcher.apply_done(done)
        for chunk in outcome.chunks:
            request = self.requests.of_sequence(chunk.sequence)
            logprobs, is_last = chunk.prompt_logprobs, chunk.is_last
            if self.requests.note_chunk(request, logprobs, is_last=is_last, now=now):
                self._counters["computed_here"] += not self._is_local
        for undrawn in outcome.failed:
            request = self.requests.of_sequence(undrawn.sequence)
            self._fail(request, undrawn.failure, now)
        for drawn in outcome.samples:
            parent = self.requests.of_sequence(drawn.sequence)
            self.requests.fork(parent, drawn.tokens, drawn.logprobs, now, is_known=True)
        for token in outcome.tokens:
            request = self.requests.of_sequence(token.sequence)
            request.speculated += token.speculated
            self.requests.send_tokens(request, token.token_ids, token.logprobs, token.finish, now)

    # ---- what others may know --------------------------------------------------------------------

    def _state(self, call_id: int, now: float) -> State:
        requests, incoming = self.requests, self.transfers.incoming
        troubled = (self._worker_health, self._starvation, self.transfers.writers)
        return State(
            call_id=call_id,
            is_ready=self.is_ready,
            queues={
                "waiting": requests.waiting_count, "transfer": incoming.under_way_count,
                "prealloc": self._admission.short_count(requests.queue, now),
                "retracted": sum(r.output_count > 0 for r in requests.queue),
                "ready": self.batcher.ready_count, "draining": incoming.abandoned_count,
                "running": self.batcher.running_count + self.batcher.prompt_count,
            },
            counters={
                **self._counters, **self._starvation.counters, **requests.counters,
                **self.returns.counters, **self.tier.counters, **incoming.counters,
                **self.account.prefix_counters(), **self.batcher.proposals.counters,
                "waited_for_equal": float(self._admission.followed_count),
                **self._self_tests.counters,
                "stale_messages": self._counters["stale_messages"] + self.transfers.stale_count,
                "peers_lost": float(self.transfers.links.connections.lost_count),
            },
            page_groups=self.account.states(self._facts.layout),
            peers=self.transfers.states(),
            prefix_cache=self.account.prefix_state(),
            step_count=self.batcher.step_count,
            workers=list(self._facts.workers),
            is_paused=self._interruptions.is_paused,
            trouble=next((one.trouble for one in troubled if one.trouble), ""),
        )  # fmt: skip

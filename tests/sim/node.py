"""One server of the simulation: a real scheduler core, its worker, and what is done to them.

It crashes and comes back as a new incarnation, freezes, drains, and leaves a stopped worker behind.
Knows the world it lives in, which has the time, the network and the clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from common.config import TransferMode, Verify
from common.protocol.frontend import (
    Continue,
    Drain,
    Failed,
    GetState,
    Outputs,
    Pause,
    SetPeers,
    State,
    Submit,
    Tokens,
    WantedPeer,
)
from common.protocol.peer import PROTOCOL_VERSION, Detached, TransferRequest
from common.protocol.worker import Step, StepDone, WorkerToScheduler
from common.runtime.undelivered import Undelivered
from common.scheduling.events import (
    Dial,
    Effect,
    Event,
    FromFrontend,
    FromPeer,
    FromWorker,
    FrontendBehind,
    GiveUp,
    HangUp,
    ProcessesGone,
    Stopping,
    Tick,
    ToFrontend,
    ToPeer,
    ToWorkers,
    WatchProcesses,
)
from common.scheduling.facts import Pace, SchedulerLimits
from common.scheduling.in_flight import IN_FLIGHT_MAX
from common.scheduling.peers import REMOVED_REASON
from decode_server.output_lengths import REMEMBERED_COUNT
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.sim import order, releases, wire
from tests.sim.client import can_follow
from tests.sim.invariants import check_core, check_credits, check_told, is_set_aside
from tests.sim.promises import NONE_THERE, PeerWaits
from tests.sim.settings import core_of, facts_of, limits_of
from tests.sim.sim_worker import SimWorker

if TYPE_CHECKING:
    from tests.sim.world import World


class Node:
    """One server: a core and its worker. Reborn under the same name after a crash.

    first_role: in which requests were meant for it. release: the newest version of the protocol
    that it speaks. is_unsettled: its workers had another role, and peers may still write there.
    links: what its settings say. wanted: what its frontend says now, if that has ever changed.
    hung_up: links that its core has closed for good.
    returns_caches: caches of ended turns go back to prefill servers.
    unreachable_peers: of a decode server, as `SimTransfers.unreachable`.
    is_paused: what its frontend said last; is_still: what its core has heard. is_cut_off: its
    scheduler ends, and what it tells clients is not heard. weight_version: of its workers,
    next_weight_version: once another scheduler takes them on.
    prompt_token_s: what its workers measured at the start; 0.0 for nothing.
    expects_short_outputs: it has seen many that ended with their first token, so it takes in more
    than its pool holds when the next ones are long.
    """

    def __init__(self, world: World, name: str, role: str, page_size: int, pages: int) -> None:
        self.world, self.name = world, name
        self.role = self.first_role = role
        self.release = PROTOCOL_VERSION
        self.page_size, self.pages = page_size, pages
        self.page_counts: tuple[int, ...] = (pages,)
        self.links: list[str] = []
        self.hung_up: set[str] = set()
        self.wanted: list[WantedPeer] | None = None
        self.is_local = False
        self.host_ids: tuple[str, ...] = ("here",)
        self.may_fall_back = False
        self.computes_rests = False
        self.prompt_token_s = 0.0
        self.has_prefix_cache = True
        self.checkpoint_max = 0
        self.digest_lookahead = 0  # 1 with a draft
        self.in_flight_max = IN_FLIGHT_MAX
        self.proposal_max, self.right_rate = 0, 0.0
        self.guess_count = 0
        self.returns_caches = False
        self.host_share = self.changed_rate = 0.0
        self.unreachable_peers = ""
        self.running_max = 8
        self.queue_max = 64
        self.pace = Pace()
        self.expects_short_outputs = False
        self.self_test_interval_s = 30.0
        self.given_up = ""
        self.has_bare_stage = False
        self.transfer_mode = TransferMode.DIRECT
        self.verify = Verify.OFF
        self.life = 0
        self.process_life = 0
        self.ended_workers: list[SimWorker] = []
        self.is_up = False
        self.is_frozen = False
        self.is_draining = False
        self.is_unsettled = False
        self.thawed_at = 0.0
        self.is_frontend_stopped = False
        self.is_paused = self.is_still = self.is_cut_off = False
        self.weight_version = self.next_weight_version = 0
        self.backlog: list[Event] = []
        self._is_turning = False
        self._answers: list[Event] = []
        self._is_full = False
        self._page_counts: list[int] = []

    # ---- its processes ---------------------------------------------------------------------------

    def boot(self, predecessor: SimWorker | None = None) -> None:
        """predecessor: workers of a scheduler that crashed, which live; else all begins anew."""
        self.world.tell(self.name, "boots" if predecessor is None else "has another scheduler")
        self.life += 1
        if predecessor is None:
            self._end_workers()
            self.is_unsettled = False
            self.process_life = self.life
            self.world.tally["restarts"] += self.life > 1
        else:
            self.ended_workers.append(predecessor)
        self.is_up, self.is_frozen, self.is_draining = True, False, False
        self.backlog = []
        self.is_still = self.is_cut_off = False
        self.weight_version = self.next_weight_version
        self.hung_up = set()
        self.peer_waits = PeerWaits()
        self.is_frontend_stopped = False
        self.undelivered = Undelivered()
        self.facts = facts_of(self, predecessor)
        self.core = self.make_core(limits_of(self))
        if self.world.watches_order:
            order.watch(self.core)
        if self.expects_short_outputs and isinstance(self.core, DecodeScheduler):
            for _ in range(REMEMBERED_COUNT):
                self.core.requests.answers.lengths.note_end(1)
        self._boot_worker(predecessor)
        if self.is_paused:
            self.pause()
        self.feed(Tick())
        if self.wanted is not None:
            self.want(self.wanted)
        self.world.follow(self)

    @property
    def process_id(self) -> int:
        """That of no other server, nor of this one's workers in another life."""
        return 1000 * (1 + list(self.world.nodes).index(self.name)) + self.process_life

    def make_core(self, limits: SchedulerLimits) -> PrefillScheduler | DecodeScheduler:
        return core_of(self, limits)

    def _boot_worker(self, predecessor: SimWorker | None) -> None:
        life, world, core = self.life, self.world, self.core

        def reply(message: WorkerToScheduler) -> None:
            if self.life == life and self.is_up:
                self.feed(FromWorker(wire.from_worker(message)))

        self.worker = SimWorker(
            self.facts, world.rng, world.after, reply, world.transport, world.tally, predecessor
        )
        self.worker.slow_step_rate = world.slow_step_rate
        self.worker.right_rate = self.right_rate
        self.worker.transfers.damage_rate = world.damage_rate
        if self.role == "decode":
            self.worker.transfers.unreachable = self.unreachable_peers
        self.worker.transfers.damage_rng = world.damage_rng
        self.worker.tier.changed_rate = self.changed_rate
        self.worker.cache.version = self.weight_version
        if world.is_honest:
            self.worker.cache.owner = core.account.pool
            self.worker.tier.owner = core.account.host_pool
        if world.is_honest:
            self.worker.transfers.awaits = lambda transfer_id, pages: (
                self.life != life or not self.is_up or is_set_aside(core, transfer_id, pages)
            )

    def crash(self, linger_s: float = 0.0) -> None:
        """linger_s: how long the worker outlives its server, stopped; its puts land at the end."""
        self.world.tell(self.name, f"crashes, its worker lingers {linger_s:.2f} s")
        self.world.tally["crashes" if not linger_s else "crashes that leave a worker"] += 1
        self.harvest()
        self.is_up = False
        worker, incarnation = self.worker, self.facts.incarnation
        worker.cache.owner = worker.tier.owner = None
        workers = [*self.ended_workers, worker]

        def bury() -> None:
            worker.go_on()
            self.world.lingering.pop(incarnation, None)
            for one in workers:
                one.process.is_dead = True
                self._tell_gone(ProcessesGone(one.facts.incarnation))

        if linger_s:
            worker.stop()
            self.world.lingering[incarnation] = worker
            self.world.after(linger_s, bury)
        else:
            bury()
        self.lose_clients()

    def _end_workers(self) -> None:
        """Those that outlived their scheduler, and waited for the next one in vain."""
        living = [*self.ended_workers, self.worker] if self.life > 1 else []
        for worker in living:
            incarnation = worker.facts.incarnation
            if not worker.process.is_dead and incarnation not in self.world.lingering:
                worker.process.is_dead = True
                self._tell_gone(ProcessesGone(incarnation))
        self.ended_workers = []

    def _tell_gone(self, gone: ProcessesGone) -> None:
        """Who watches its processes hears that they have ended."""
        for node in self.world.nodes.values():
            if node.is_up and gone.incarnation in node_watches(node):
                delay = self.world.rng.uniform(0.001, 0.02)
                self.world.after(delay, lambda n=node: n.feed(gone))  # type: ignore[misc]

    def lose_clients(self, *, may_follow: bool = True) -> None:
        """Its scheduler is gone: clients wait for the next one, if their frontends do."""
        may_follow = may_follow and self.world.follows_crashes and self.role == "decode"
        for client in self.world.clients.values():
            if client.node != self.name or client.finals:
                continue
            if may_follow and can_follow(client):
                client.is_waiting_for_server = True
            else:
                client.finals.append("crashed with its server")

    def give_up(self, reason: str) -> None:
        """Its process is spent, and it is started anew. That is right where peers may still write
        here that say nothing of it: of the first release, or of the role that this server has
        taken on in the midst of their transfers."""
        is_mixed = any(node.release == releases.FIRST for node in self.world.nodes.values())
        if not is_mixed and not self.is_unsettled:
            self.given_up = reason
            return
        self.world.tally["servers that gave themselves up"] += 1
        self.world.after(0.0, lambda: self.is_up and self.crash())
        self.world.after(0.5, lambda: self.is_up or self.boot())

    def drain(self) -> None:
        """Its frontend lets nobody in any more, and its peers are told."""
        if self.is_up:
            self.world.tally["drains"] += 1
            self.is_draining = True
            self.feed(FromFrontend(wire.from_frontend(Drain())))

    def leave(self) -> None:
        """It was told to stop: its scheduler ends, and its workers once they have heard of it."""
        self.feed(Stopping())
        self.is_frozen = True
        self.world.after(0.05, self.crash)

    def want(self, peers: list[WantedPeer]) -> None:
        """Its frontend says which prefill servers are wanted from now on."""
        before = self.wanted_links
        now = {one.address for one in peers}
        self.world.tally["peers removed"] += len(before - now)
        self.world.tally["peers added"] += len(now - before)
        self.world.tally["peers kept"] += sum(not one.is_dialled for one in peers)
        self.wanted = peers
        if self.is_up and self.role == "decode":
            self.feed(FromFrontend(wire.from_frontend(SetPeers(peers))))

    @property
    def wanted_links(self) -> set[str]:
        return {*self.links} if self.wanted is None else {one.address for one in self.wanted}

    def want_all(self) -> None:
        self.want(list(map(WantedPeer, self.links)))

    def stop_frontend(self, *, is_behind: bool) -> None:
        """What it is told waits for it. is_behind: more than may wait while steps are computed."""
        if self.is_up:
            self.world.tell(self.name, f"its frontend stops, steps are held: {is_behind}")
            self.world.tally["stopped frontends"] += 1
            self.is_frontend_stopped = True
            if is_behind:
                self.feed(FrontendBehind(True))

    def resume_frontend(self) -> None:
        if self.is_up and self.is_frontend_stopped:
            self.world.tell(self.name, "its frontend goes on")
            self.is_frontend_stopped = False
            self.thawed_at = self.world.now
            self.tell_frontend()
            self.feed(FrontendBehind(False))

    def tell_frontend(self) -> None:
        while (sent := self.undelivered.take()) is not None:
            message = wire.to_frontend(sent)
            for output in message.items if isinstance(message, Outputs) else ():
                self.world.reply(self.name, output)

    def pause(self, *, retracts: bool = False) -> None:
        """Its frontend is told so, and tells every scheduler that begins."""
        self.is_paused = True
        if self.is_up:
            self.world.tally["pauses"] += 1
            self.feed(FromFrontend(wire.from_frontend(Pause(1, retracts))))

    def go_on(self) -> None:
        self.is_paused = False
        if self.is_up:
            self.thawed_at = self.world.now
            self.feed(FromFrontend(wire.from_frontend(Continue(2))))

    def freeze(self) -> None:
        if self.is_up:
            self.world.tell(self.name, "freezes")
            self.world.tally["frozen schedulers"] += 1
            self.is_frozen = True

    def thaw(self) -> None:
        """What waits in its sockets is read socket by socket, and decided on once."""
        self.world.tell(self.name, "thaws")
        self.is_frozen = False
        self.thawed_at = self.world.now
        backlog, self.backlog = self.backlog, []
        kinds = ((FromFrontend, FromWorker), FromPeer, ProcessesGone)
        events = [event for kind in kinds for event in backlog if isinstance(event, kind)]
        self.turn(events, must_check=True)

    # ---- its scheduler ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Its workers' beats lie in its socket with the tick: all are taken, then it decides."""
        if not self.is_up:
            return
        beats = [FromWorker(wire.from_worker(beat)) for beat in self.worker.beats()]
        if self.is_frozen:
            self.backlog += beats
            return
        self.turn([*beats, Tick()], must_check=True)
        if isinstance(self.core, DecodeScheduler) and not self.is_still:
            self.peer_waits.check(self.core, self.world.now, self.thawed_at)

    def feed(self, event: Event) -> None:
        if self.is_up and self.is_frozen:
            if not isinstance(event, Tick):
                self.backlog.append(event)
        elif self.is_up and self._is_turning:
            self._answers.append(event)
        elif self.is_up:
            self.turn([event], must_check=not isinstance(event, FromWorker | FromPeer))

    def turn(self, events: Iterable[Event], *, must_check: bool) -> None:
        """Takes them all, then decides. What comes of an effect at once, as from a worker that has
        nothing to wait for, is heard when all effects have left."""
        self._is_turning = True
        for event in events:
            self.take(event)
        self.schedule(must_check=must_check)
        if not self.is_frontend_stopped:
            self.tell_frontend()
        self._is_turning = False
        answers, self._answers = self._answers, []
        for event in answers:
            self.feed(event)

    def take(self, event: Event) -> None:
        now = self.world.now
        if self.world.log is not None:
            self.world.tell(self.name, event)
        if isinstance(event, FromFrontend) and isinstance(event.message, Submit):
            for sample in event.message.samples:
                self.world.clients[sample.request_id].submitted_at = now
        if isinstance(event, FromWorker) and isinstance(event.message, StepDone):
            batcher = self.core.batcher
            left = set(event.message.request_ids) - {*batcher._running, *batcher._prompts}
            self.world.tally["tokens of who had left"] += len(left)
        self.carry_out(self.core.handle(event, now))
        if isinstance(event, FromFrontend) and isinstance(event.message, Pause | Continue):
            self.is_still = isinstance(event.message, Pause)

    def schedule(self, *, must_check: bool) -> None:
        """Pages are looked at whenever they seem to have moved, and if that is asked for."""
        effects = self.core.schedule(self.world.now)
        self.carry_out(effects)
        if isinstance(self.core, DecodeScheduler):
            self.peer_waits.note(self.core, self.world.now)
            if self.world.is_honest:
                check_credits(self.core, effects)
        pool = self.core.account.pool
        counts = [*map(len, pool._free), *map(len, pool._used)]
        if counts == self._page_counts and not must_check:
            return
        self._page_counts = counts
        pool.check()
        if self.world.is_honest:
            self.check()
        full = [live for live, free in zip(self.world.lives, pool._free, strict=True) if not free]
        self.world.slots_ran_out |= any(not live.is_paged for live in full)
        self.world.tally["pools that ran full"] += bool(full) and not self._is_full
        self._is_full = bool(full)

    @property
    def request_token_max(self) -> int:
        """As its core has it; before that begins nothing is known."""
        return self.core.request_token_max if self.life else 10**9

    def dials(self, other: Node) -> bool:
        """Which of two servers opens the link between them."""
        return self.role == "decode"

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self.is_up and not self.is_draining

    def check(self) -> None:
        """Raises: AssertionError if the core has lost a request or a page."""
        check_core(self.core)

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if self.world.log is not None:
                self.world.tell(f"{self.name} ->", effect)
            for watch in self.world.watchers:
                watch(self, effect)
            match effect:
                case ToFrontend(message=Tokens() | Failed()) if self.is_cut_off:
                    pass  # its frontend asks the next scheduler
                case ToFrontend(message=message):
                    if isinstance(message, Failed) and message.message.startswith(NONE_THERE):
                        self.peer_waits.check_answer(message.request_id, self.world.now)
                    self.undelivered.add(message)
                    if isinstance(message, Failed):
                        self.world.note_failed(message.request_id)
                case ToWorkers(message=worker_message):
                    if isinstance(worker_message, Step):
                        assert not self.is_still, f"{self.name} is paused, and plans a step"
                    if self.role == "decode" and isinstance(worker_message, Step):
                        count = len(worker_message.chunks)
                        self.world.tally["prompts computed by decode servers"] += count
                    self.worker.handle(wire.to_worker(worker_message), self.world.find_worker)
                case ToPeer(link=link, message=peer_message):
                    self.world.tally[type(peer_message).__name__] += 1
                    if isinstance(peer_message, TransferRequest):
                        self._note_asked(peer_message)
                    if isinstance(self.core, DecodeScheduler) and self.world.is_honest:
                        check_told(self.core, link, peer_message, self.wanted_links)
                    if isinstance(peer_message, Detached) and self.role == "decode":
                        self.world.tally["peers let go"] += peer_message.reason == REMOVED_REASON
                    self.world.post(self, link, peer_message)
                case GiveUp(reason=reason):
                    self.give_up(reason)
                case Dial(link=link):
                    self.hung_up.discard(link)
                case HangUp(link=link):
                    self.hung_up.add(link)
                case WatchProcesses(incarnation=incarnation):
                    self.world.watches.add((self.name, incarnation))
                    if self.world.find_worker(incarnation) is None:
                        self.feed(ProcessesGone(incarnation))

    def _note_asked(self, message: TransferRequest) -> None:
        self.world.tally["self-tests"] += message.is_self_test
        transfer = self.core.transfers.incoming.get(message.transfer_id)
        owner = transfer.owner if transfer is not None else None
        client = self.world.clients.get(owner or 0)
        if client is not None:
            client.asked_count += 1

    def harvest(self) -> None:
        """Add what its core has counted in this life to what happened."""
        for name, value in self.state().counters.items():
            self.world.tally[f"{self.role}: {name}"] += int(value)

    def state(self) -> State:
        """What its core says to whoever asks."""
        asked = FromFrontend(wire.from_frontend(GetState(0)))
        (effect,) = self.core.handle(asked, self.world.now)
        assert isinstance(effect, ToFrontend)
        state = wire.to_frontend(effect.message)
        assert isinstance(state, State)
        return state


def node_watches(node: Node) -> set[str]:
    return {i for name, i in node.world.watches if name == node.name}

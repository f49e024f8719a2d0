"""The process around a scheduler core: its sockets, and the time.

One thread, which blocks only in the poll. Until all workers are ready it answers the frontend for
the server that is not ready; then it makes the core and drives it to the end. Workers outlive it:
each is taken on for this scheduler's session, and what it says before it is ready is meant for
another one. It decides nothing, and knows nothing of roles.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
from collections.abc import Callable
from typing import Protocol, assert_never

from common.clock import SystemClock
from common.config import ServerConfig
from common.errors import BatonError, ConfigError
from common.exit_codes import EXIT_FAILED, EXIT_FOLLOWED, EXIT_START_AGAIN, exit_code_of
from common.protocol.frontend import (
    Drain,
    Failed,
    FrontendToScheduler,
    GetState,
    Pause,
    ServerInfo,
    State,
    Tokens,
    UpdateWeights,
)
from common.protocol.weights import WeightsLoaded
from common.protocol.worker import (
    Begin,
    Release,
    SchedulerToWorker,
    Shutdown,
    WorkerReady,
    WorkerToScheduler,
)
from common.runtime.gathered_facts import describe_server, gather_facts, log_ready
from common.runtime.peer_endpoint import PeerEnd
from common.runtime.scheduler_sockets import SchedulerSockets
from common.runtime.weight_update import WeightUpdate
from common.scheduling.events import (
    Dial,
    DrainEnded,
    Effect,
    Event,
    FromFrontend,
    FromWorker,
    FrontendBehind,
    GiveUp,
    HangUp,
    LinkRefused,
    ProcessesGone,
    Report,
    Stopping,
    Tick,
    ToFrontend,
    ToPeer,
    ToWorkers,
    WatchProcesses,
    WorkersStopped,
)
from common.scheduling.facts import ServerFacts
from common.scheduling.log_rate_limiter import LogRateLimiter
from common.stopped import is_stopped
from common.transfers.transfers import Transfers

log = logging.getLogger(__name__)

# Effects of one round can cause events at once only through sockets, so a round is bounded by what
# the sockets held; this bounds how long the loop goes without looking at the time.
POLL_MAX_S = 0.5
PAUSE_MAX_S = 0.5  # peers wait for 0.8 s; a loaded machine takes some hundredths

# Of a server that takes on another role or other weights: for transfers that end or are cut off,
# and for peers to answer its last words, behind what they had asked before. Less than the
# supervisor waits for it.
SETTLE_TIMEOUT_S = 2.0
ANSWERS_TIMEOUT_S = 0.5

# How long a worker may take to end what the scheduler before left: a step, and closed connections.
TAKE_OVER_TIMEOUT_S = 20.0

STANDBY = "on standby, with its weights loaded: POST /switch_role has it begin to serve"

# Refused connections that are remembered while the workers still load.
EARLY_REFUSALS_MAX = 64


class WorkerLost(BatonError):
    """A worker takes no messages: its server can't go on."""


class ServerSpent(BatonError):
    """This process can't go on, and a new one can."""


class Core(Protocol):
    """A scheduler core, as the loop drives it."""

    request_token_max: int
    transfers: Transfers

    @property
    def is_idle(self) -> bool: ...

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def schedule(self, now: float) -> list[Effect]: ...

    def next_wakeup(self, now: float) -> float: ...


MakeCore = Callable[[ServerFacts, ServerConfig], Core]
OpenPeers = Callable[[ServerConfig], PeerEnd]


class SchedulerLoop:
    """Sockets and the core of one server."""

    def __init__(self, config: ServerConfig, make_core: MakeCore, open_peers: OpenPeers) -> None:
        """open_peers: listens or dials (`peer_ends.py`). Raises: ConfigError."""
        self._config = config
        self._make_core = make_core
        self._clock = SystemClock()
        self._sockets = SchedulerSockets(config, open_peers, self._warn_at_limited_rate)
        self._dropped_lines = LogRateLimiter()
        self._early_refusals: list[LinkRefused] = []
        self._session = secrets.token_hex(8)
        self._taken_at: dict[int, float] = {}
        self._workers: dict[int, WorkerReady] = {}
        self._stopped_ranks: tuple[int, ...] = ()
        self._look_at_workers_at = 0.0
        self._core: Core | None = None
        self._info: ServerInfo | None = None
        self._is_frontend_known = False
        self._is_frontend_behind = False
        self._is_stopping = False
        self._is_succeeded = False
        self._is_cut_off = False
        self._stop_at = math.inf
        self._update = WeightUpdate(
            config.rank_count,
            "a server of several machines can't load other weights" if config.nnodes > 1 else "",
            self._send_workers,
            self._sockets.frontend.add,
        )

    @property
    def has_other_weights(self) -> bool:
        """Whether the workers were left to another scheduler with other weights."""
        return self._is_succeeded and bool(self._update.loaded_id)

    def run(self) -> None:
        """Until a signal asks for the end and the core is idle, or the drain time is over; or until
        workers have loaded other weights. After SIGTERM the workers are to end, else another
        scheduler is to take them on.

        Raises: WorkerLost, ServerSpent.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while not self._is_finished():
            self._take_turn()
        if self._update.loaded_id and not self._is_stopping:
            self._is_succeeded = True
            self._feed(FromFrontend(Pause(0)))
            self._go_on_while(lambda transfers: not transfers.is_settled, SETTLE_TIMEOUT_S)
        if self._is_succeeded:
            self._is_cut_off = True
            self._feed(DrainEnded())
            self._go_on_while(lambda transfers: not transfers.is_settled, SETTLE_TIMEOUT_S)
        self._feed(Stopping())
        if self._is_succeeded:
            self._go_on_while(lambda transfers: transfers.has_peers, ANSWERS_TIMEOUT_S)
        is_quiet = self._core is not None and self._core.transfers.is_quiet
        release = Release(is_quiet, self._update.loaded_id)
        self._send_workers(release if self._is_succeeded else Shutdown())

    def _go_on_while(self, is_busy: Callable[[Transfers], bool], timeout_s: float) -> None:
        """Workers that live on are handed over with nothing under way, if that can be had soon: a
        scheduler of the other role can't tell peers how their transfers ended."""
        until = self._clock.now() + timeout_s
        while self._core is not None and is_busy(self._core.transfers):
            if self._clock.now() > until:
                return
            self._take_turn()

    def _take_turn(self) -> None:
        """Read all sockets once, then decide."""
        now = self._clock.now()
        timeout = POLL_MAX_S
        if self._core is not None:
            timeout = min(timeout, max(0.0, self._core.next_wakeup(now) - now))
        self._sockets.poll(timeout)
        self._note_pause(self._clock.now() - now - timeout)
        self._receive_frontend()
        self._receive_workers()
        self._receive_peers()
        for key in self._sockets.take_gone():
            self._feed(ProcessesGone(key))
        self._look_at_workers()
        self._look_at_frontend()
        if self._core is not None:
            self._carry_out(self._core.schedule(self._clock.now()))
        # Last, so that workers have their next step before the frontend has its output.
        self._sockets.frontend.flush()

    def close(self) -> None:
        self._sockets.close()

    def _handle_signal(self, signum: int, frame: object) -> None:
        self._is_stopping = True
        self._is_succeeded = signum == signal.SIGUSR1
        self._limit_drain()

    def _limit_drain(self) -> None:
        """The drain time runs from the first request for it, the frontend's or the supervisor's."""
        if self._stop_at == math.inf:
            self._stop_at = self._clock.now() + self._config.drain_timeout_s

    def _is_finished(self) -> bool:
        if not self._is_stopping:
            return bool(self._update.loaded_id)
        is_idle = self._core is None or self._core.is_idle
        return is_idle or self._clock.now() >= self._stop_at

    # ---- what comes in ---------------------------------------------------------------------------

    def _receive_frontend(self) -> None:
        for message in self._sockets.receive_frontend():
            self._handle_frontend(message)

    def _handle_frontend(self, message: FrontendToScheduler) -> None:
        if not self._is_frontend_known:
            self._is_frontend_known = True
            self._send_info()
        if isinstance(message, Drain):
            self._limit_drain()
        if isinstance(message, UpdateWeights):
            if self._info is not None and self._info.incarnation == message.incarnation:
                self._update.begin(message)
        elif self._core is not None:
            self._feed(FromFrontend(message))
        elif isinstance(message, GetState):
            trouble = STANDBY if self._info is not None else ""
            self._sockets.frontend.add(
                State(message.call_id, False, {}, {}, [], [], trouble=trouble)
            )

    def _receive_workers(self) -> None:
        for rank, message in self._sockets.receive_workers():
            self._handle_worker(rank, message)
        now = self._clock.now()
        for rank, taken_at in self._taken_at.items():
            if now > taken_at + TAKE_OVER_TIMEOUT_S:
                raise ServerSpent(f"worker {rank} does not end what another scheduler began")

    def _handle_worker(self, rank: int, message: WorkerToScheduler) -> None:
        if isinstance(message, WeightsLoaded):
            self._update.note_loaded(message)
        elif rank in self._workers:
            self._feed(FromWorker(message))
        elif isinstance(message, WorkerReady) and message.session == self._session:
            self._workers[rank] = message
            self._taken_at.pop(rank, None)
            if len(self._workers) == self._config.rank_count:
                self._start_core()
        elif rank not in self._taken_at:
            self._taken_at[rank] = self._clock.now()
            self._sockets.send_worker(rank, Begin(self._session))

    def _receive_peers(self) -> None:
        events = self._sockets.peers.receive()
        if self._core is None:
            self._early_refusals += [e for e in events if isinstance(e, LinkRefused)]
            del self._early_refusals[EARLY_REFUSALS_MAX:]
            return
        refusals, self._early_refusals = self._early_refusals, []
        for event in (*refusals, *events):
            self._feed(event)

    def _look_at_workers(self) -> None:
        """A stopped process can't report it. Those of other machines are known by silence."""
        now = self._clock.now()
        if self._core is None or now < self._look_at_workers_at:
            return
        self._look_at_workers_at = now + self._config.heartbeat_interval_s
        ranks = tuple(r for r in self._config.local_ranks if is_stopped(self._workers[r].pid))
        if ranks != self._stopped_ranks:
            self._stopped_ranks = ranks
            self._feed(WorkersStopped(ranks))

    def _look_at_frontend(self) -> None:
        """A frontend that reads nothing for long holds steps back, and nothing else."""
        frontend = self._sockets.frontend
        if frontend.has_unsent:
            frontend.flush()
        is_behind = frontend.is_behind
        if is_behind == self._is_frontend_behind:
            return
        self._is_frontend_behind = is_behind
        if is_behind:
            self._warn_at_limited_rate(
                "the frontend reads no output: no new steps until it does; is its process stopped, "
                "or without a free CPU?"
            )
        self._feed(FrontendBehind(is_behind))

    def _note_pause(self, pause_s: float) -> None:
        """The cause, if peers report meanwhile that they gave this server up."""
        if pause_s > PAUSE_MAX_S:
            log.warning(
                "this scheduler did not run for %.1f s: SIGSTOP, or no free CPU; peers give a "
                "server up after --peer-timeout",
                pause_s,
            )

    def _warn_at_limited_rate(self, text: str) -> None:
        """For lines that other processes can cause any number of."""
        line = self._dropped_lines.admit(text, self._clock.now())
        if line:
            log.warning("%s", line)

    # ---- the core --------------------------------------------------------------------------------

    def _start_core(self) -> None:
        """All workers are ready."""
        facts = gather_facts(self._config, self._workers)
        core = self._make_core(facts, self._config)
        running_max = facts.running_max(self._config.max_running_requests)
        self._info = describe_server(facts, core.request_token_max, running_max, self._workers)
        self._send_info()
        log_ready(self._config, facts, running_max)
        if not self._config.standby:
            self._core = core
            self._feed(Tick())

    def _send_info(self) -> None:
        if self._info is not None and self._is_frontend_known:
            self._sockets.frontend.add(self._info)

    def _feed(self, event: Event | None) -> None:
        if self._core is not None and event is not None:
            self._carry_out(self._core.handle(event, self._clock.now()))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToFrontend(message=message):
                    # The frontend asks the next scheduler for what was cut off.
                    if not (self._is_cut_off and isinstance(message, Tokens | Failed)):
                        self._sockets.frontend.add(message)
                case ToWorkers(message=worker_message):
                    self._send_workers(worker_message)
                case ToPeer(link=link, message=peer_message):
                    self._feed(self._sockets.peers.send(link, peer_message))
                case Dial(link=link):
                    self._feed(self._sockets.peers.dial(link))
                case HangUp(link=link):
                    self._sockets.peers.hang_up(link)
                case WatchProcesses(incarnation=incarnation, pids=pids):
                    self._sockets.watch_processes(incarnation, pids)
                case GiveUp(reason=reason):
                    raise ServerSpent(reason)
                case Report(text=text, is_warning=is_warning):
                    log.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
                case _:
                    assert_never(effect)

    def _send_workers(self, message: SchedulerToWorker) -> None:
        lost = self._sockets.send_workers(message)
        if lost and not self._is_stopping:
            raise WorkerLost(
                f"no messages are taken by {', '.join(lost)}: ended, or standing still"
            )


def run(config: ServerConfig, make_core: MakeCore, open_peers: OpenPeers) -> int:
    """The scheduler process. Returns its exit code, after a log line for what ended it."""
    try:
        loop = SchedulerLoop(config, make_core, open_peers)
    except ConfigError as error:
        log.error("%s", error)
        return exit_code_of(error)
    log.debug("scheduler process %d", os.getpid())
    try:
        loop.run()
    except WorkerLost as error:
        log.error("%s: the server stops", error)
        return EXIT_FAILED
    except ServerSpent as error:
        log.error("%s: the server ends with exit code 75 and must be started again", error)
        return EXIT_START_AGAIN
    finally:
        loop.close()
    return EXIT_FOLLOWED if loop.has_other_weights else 0
